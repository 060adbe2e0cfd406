"""Help in groups: what nine of ten users need, and with --help-all every option."""

from typing import Any, ClassVar

from typer.core import TyperCommand

# Panel -> parameters; those before the bar are shown by --help, the others by --help-all alone.
PANELS = {
    "How far": "factor target | context original_context from_original",
    "Which method": "method for_loaders like strategy train start | within even_so length_only "
    "budget ceiling keep_short",
    "Knobs of a method": "| theta beta_fast beta_slow low_freq_factor high_freq_factor truncate "
    "pair_factors attention_factor temperature",
    "Data": "data measure lengths tasks | max_docs column split data_revision split_documents "
    "max_document_mib pack packing window items depths haystack passages chat chat_args protocol "
    "lm_eval lm_eval_limit retrieval_items held_out retrieval_share eval_documents seed",
    "Training": "steps rank | epochs batch_tokens micro_rows learning_rate warmup schedule alpha "
    "dropout targets train_norms train_embeddings qlora control eval_every patience save_every",
    "What it is compared with": "base adapter fail_if |",
    "What follows": "fit finetune evaluate |",
    "Output": "output losses full force dry_run as_json quiet | serve link no_verify hash plot "
    "push_to_hub public report_to",
    "Loading": "| revision trust_remote_code dtype device device_map attn_implementation chunk "
    "slice_memory",
}
_PANEL = {name: panel for panel, names in PANELS.items() for name in names.split()}
_FIRST = {name for names in PANELS.values() for name in names.partition("|")[0].split()}


class Grouped(TyperCommand):
    """A command whose help is in groups."""

    everything: ClassVar[bool] = False

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then the panels in their order."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        sections |= {panel: [] for panel in PANELS}
        left_out = 0
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            is_help = "--help" in parameter.opts
            if is_help and record is not None:
                record = ("-h, --help", record[1])  # the other name stands under "More"
            first = is_argument or is_help or parameter.name in _FIRST
            if record is not None and (first or self.everything):
                panel = "Arguments" if is_argument else _PANEL.get(parameter.name, "Output")
                sections[panel].append(record)
            left_out += not (first or self.everything)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if left_out:
            with formatter.section("More"):
                formatter.write_dl([("--help-all", f"show {left_out} more options")])
