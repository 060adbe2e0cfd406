"""The public functions with all their options; written by scripts/make_signatures.py."""
# fmt: off
# ruff: noqa

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from peft import PeftModel
from ropext.base.narration import Say
from ropext.base.narration import Show
from ropext.files.checkpoint.push import Pushed
from ropext.files.inspecting.model import Inspection
from ropext.files.schemes.inspection import PositionFacts
from ropext.models.patching import Model
from ropext.options.fields import TextsOrPlace
from ropext.pipeline.python_results import Evaluated
from ropext.pipeline.python_results import Extended
from ropext.pipeline.python_results import Ran
from ropext.pipeline.recipe import Recipe
from ropext.planning import ExtensionPlan
from ropext.results.gates import Gate
from ropext.results.report.compared import Compared
from ropext.training.result import Finetuned
from ropext.training.result import Fitted
from ropext.verifying.checks import Verification
from ropext.verifying.plain_server import PlainServer
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase
from transformers import PretrainedConfig
from typing import Any
from typing import Literal
from typing import Optional
import os
from ropext import bundled as bundled
from ropext import errors as errors
from ropext import patching as patching
from ropext import rope as rope

__version__: str

def compare(*runs: 'str | Path | Evaluated | Ran', output: str | Path | None=None, labels: Mapping[str, str] | None=None) -> Compared: ...
def evaluate(model: str | Path | PreTrainedModel | PeftModel, output: str | Path | None=None, *, tokenizer: PreTrainedTokenizerBase | None=None, say: Say | None=None, show: Show | None=None, stop: Callable[[], bool] | None=None, revision: str | None=None, trust_remote_code: bool=False, force: bool=False, gates: Sequence[str | Gate]=(), losses: str | Path | None=None, labels: Mapping[str, str] | None=None, column: str | None=None, split: str | None=None, data_revision: str | None=None, split_documents: str | None=None, max_docs: int=32, max_document_mib: int=64, dtype: Literal['auto', 'float32', 'bfloat16', 'float16', 'fp32', 'bf16', 'fp16']='auto', device: str='auto', device_map: str | None=None, attn_implementation: str | None=None, chunk: int | None=None, slice_memory: int=256, seed: int=0, data: TextsOrPlace | None=None, lengths: str | Sequence[int | str]=(), tasks: str | Callable[..., object] | Sequence[str | Callable[..., object]]=(), depths: float | str | Sequence[float]=(0.0, 0.25, 0.5, 0.75, 1.0), items: int=4, haystack: Literal['repeat', 'noise', 'text']='repeat', passages: str | Path | None=None, chat: bool=False, chat_args: str | Sequence[str]=(), protocol: Literal['ropext', 'yarn', 'hf-stride']='ropext', kl: bool=False, lm_eval: str | Sequence[str]=(), lm_eval_limit: int | None=None, window: int | None=None, group: int | None=None, literal: bool=False, method: str | Callable[..., object] | Sequence[str | Callable[..., object]]=(), factor: float | str | Sequence[float]=(), target: int | str | None=None, context: int | str | None=None, base: str | Path | None=None, adapter: str | Path | None=None, kv: str | Sequence[str]=()) -> Evaluated: ...
def extend(model: str | Path, output: str | Path, *, revision: str | None=None, force: bool=False, trust_remote_code: bool=False, say: Say | None=None, factor: float | None=None, target: int | str | None=None, context: int | str | None=None, original_context: int | str | None=None, from_original: bool=False, again: bool=False, for_loaders: str | Sequence[str]=(), even_so: bool=False, method: str | Callable[..., object] | None=None, attention_factor: float | None=None, temperature: float | None=None, length_only: bool=False, untrained: bool=False, theta: float | None=None, beta_fast: float | None=None, beta_slow: float | None=None, low_freq_factor: float | None=None, high_freq_factor: float | None=None, truncate: bool | None=None, pair_factors: float | str | Sequence[float] | None=None, short_pair_factors: float | str | Sequence[float] | None=None, like: str | Path | None=None, finetune: TextsOrPlace | None=None, link: Literal['copy', 'hard', 'symlink']='copy', no_verify: bool=False, hash: bool=False, data: TextsOrPlace | None=None, within: Optional[Literal['longrope', 'yarn', 'ntk']]=None) -> Extended | Ran: ...
def finetune(directory: str | Path, data: TextsOrPlace, output: str | Path, *, force: bool=False, say: Say | None=None, steps: int | None=None, batch_tokens: int | str | None=None, micro_rows: int | None=None, learning_rate: float | None=None, retrieval_share: float=0.0, packing: Literal['documents', 'glued']='documents', strategy: Literal['full', 'pose']='full', window: int | str | None=None, keep_short: int=0, eval_every: int | None=None, column: str | None=None, split: str | None=None, split_documents: str | None=None, max_document_mib: int=64, seed: int=0, data_seed: int | None=None, dtype: Literal['auto', 'float32', 'bfloat16', 'fp32', 'bf16']='auto', device: Literal['auto', 'cpu', 'cuda']='auto', attn_implementation: str | None=None, report_to: str='none', link: Literal['copy', 'hard', 'symlink']='copy', train: Optional[Literal['lora', 'new-rows', 'both']]=None, epochs: float | None=None, warmup: int | None=None, schedule: Optional[Literal['linear', 'constant', 'cosine']]=None, rank: int | None=None, alpha: int | None=None, dropout: float=0.0, targets: str | Sequence[str]=(), train_norms: bool=False, train_embeddings: bool=False, qlora: bool=False, control: bool=False, slim: bool=False, evaluate: TextsOrPlace | None=None, eval_documents: int=8, patience: int | None=None, save_every: int | None=None) -> Finetuned: ...
def fit(model: str | Path, data: TextsOrPlace, output: str | Path, *, force: bool=False, say: Say | None=None, revision: str | None=None, factor: float | None=None, target: int | str | None=None, context: int | str | None=None, original_context: int | str | None=None, from_original: bool=False, again: bool=False, for_loaders: str | Sequence[str]=(), even_so: bool=False, steps: int=40, batch_tokens: int | str=8192, micro_rows: int | None=None, learning_rate: float | None=None, retrieval_share: float=0.2, packing: Literal['documents', 'glued']='documents', strategy: Literal['full', 'pose']='full', window: int | str | None=None, keep_short: int=0, eval_every: int | None=None, column: str | None=None, split: str | None=None, split_documents: str | None=None, max_document_mib: int=64, seed: int=0, data_seed: int | None=None, dtype: Literal['auto', 'float32', 'bfloat16', 'fp32', 'bf16']='auto', device: Literal['auto', 'cpu', 'cuda']='auto', attn_implementation: str | None=None, report_to: str='none', link: Literal['copy', 'hard', 'symlink']='copy', within: Optional[Literal['longrope', 'yarn', 'ntk']]=None, start: str | Sequence[str] | None=None, ceiling: float=4.0, retrieval_items: int=40, held_out: int=16) -> Fitted | None: ...
def inspect(model: str | Path | PreTrainedModel | PretrainedConfig | Mapping[str, Any], *, factor: float | None=None, target: int | None=None, context: int | None=None, original_context: int | None=None, revision: str | None=None) -> Inspection | PositionFacts: ...
def open(run: str | Path) -> Evaluated | Compared | Ran | Extended | Finetuned | Fitted: ...
def patch(model: Model, *, window: int | None=None, group: int | None=None, literal: bool=False, factor: float | None=None, target: int | str | None=None, context: int | str | None=None, original_context: int | str | None=None, from_original: bool=False, again: bool=False, for_loaders: str | Sequence[str]=(), even_so: bool=False, method: str | Callable[..., object] | None=None, attention_factor: float | None=None, temperature: float | None=None, length_only: bool=False, untrained: bool=False, theta: float | None=None, beta_fast: float | None=None, beta_slow: float | None=None, low_freq_factor: float | None=None, high_freq_factor: float | None=None, truncate: bool | None=None, pair_factors: float | str | Sequence[float] | None=None, short_pair_factors: float | str | Sequence[float] | None=None, like: str | Path | None=None) -> Model: ...
def plan(model: str | Path | PreTrainedModel | PretrainedConfig | Mapping[str, Any], *, revision: str | None=None, factor: float | None=None, target: int | str | None=None, context: int | str | None=None, original_context: int | str | None=None, from_original: bool=False, again: bool=False, for_loaders: str | Sequence[str]=(), even_so: bool=False, method: str | Callable[..., object] | None=None, attention_factor: float | None=None, temperature: float | None=None, length_only: bool=False, untrained: bool=False, theta: float | None=None, beta_fast: float | None=None, beta_slow: float | None=None, low_freq_factor: float | None=None, high_freq_factor: float | None=None, truncate: bool | None=None, pair_factors: float | str | Sequence[float] | None=None, short_pair_factors: float | str | Sequence[float] | None=None, like: str | Path | None=None, finetune: TextsOrPlace | None=None) -> ExtensionPlan: ...
def push(directory: str | Path, repository: str, *, public: bool=False, results: Sequence[str | Path]=(), license: str | None=None, base_model: str | None=None, force: bool=False, dry_run: bool=False, bars: bool=False, say: Say | None=None, stop: Callable[[], bool] | None=None) -> Pushed: ...
def run(recipe: str | Path | Mapping[str, Any] | Recipe, output: str | Path | None=None, *, overrides: Sequence[str]=(), trust_remote_code: bool=False, begin: str | None=None, only: str | None=None, force: bool=False, keep_previous: bool=False, say: Say | None=None, show: Show | None=None) -> Ran: ...
def save(model: Any, directory: str | os.PathLike[str], *, tokenizer: PreTrainedTokenizerBase | None=None, no_verify: bool=False) -> Path: ...
def verify(directory: str | Path, *, against: str | Path | None=None, deep: bool=False, record: bool=False, endpoint: str | None=None, beside: PlainServer | None=None, tolerance: float | None=None, trust_remote_code: bool=False, say: Say | None=None, show: Show | None=None, dtype: Literal['auto', 'float32', 'bfloat16', 'float16', 'fp32', 'bf16', 'fp16']='auto', device: str='cpu') -> Verification: ...
