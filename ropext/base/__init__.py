"""What every package needs and what knows nothing about models: errors, files, locks, progress."""
