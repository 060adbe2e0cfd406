"""Plans and results as text, JSON, Markdown, pictures and pages."""
