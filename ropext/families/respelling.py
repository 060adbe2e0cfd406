"""Find errors in the spellings of a config that somebody else wrote, and rewrite them."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropext.base.errors import InputError, RopextError, UsageError
from ropext.families.config import named, text_part
from ropext.families.geometry import TextConfig
from ropext.families.model import LENGTH_KEYS, Model, Problem, diff
from ropext.families.params import FORM_KEYS, LENGTHS
from ropext.families.reading import as_read
from ropext.families.table import family
from ropext.families.writing import write
from ropext.scaling.forms import NAMED, ORIGINAL, Params
from ropext.scaling.rope import ABSENT, Edit

ROPE_KEYS = ("rope_scaling", "rope_parameters", "rope_theta")
# Forms whose code in transformers 5 fails on a head_dim of null.
NEED_HEAD_DIM = ("yarn", "dynamic", "longrope")


def respell(
    config: dict[str, Any], params: Sequence[Params] = (), target: int | None = None
) -> dict[str, Any]:
    """Return config.json with every spelling rewritten: from `params`, one for each scaled
    embedding, or from the values that transformers 5 reads."""
    model = as_read(config)
    sites = model.scaled_sites
    if len(params) not in (0, len(sites)):
        raise InputError(
            f"ropext.json has {len(params)} scaled rotary embeddings and config.json {len(sites)}:"
            " they belong to different models"
        )
    for key in ("rope_type", "rope_theta"):
        if not all(key in each for each in params):
            raise InputError(f"ropext.json: the parameters of a scaled embedding lack {key}")
    return _config_written_anew(config, model, params or [site.params for site in sites], target)


def _config_written_anew(
    config: dict[str, Any], model: Model, params: Sequence[Params], target: int | None
) -> dict[str, Any]:
    """Return a config with these rope dicts and a length in every spelling that transformers or an
    engine reads."""
    length = target or model.context
    labels = [site.label for site in model.scaled_sites]
    out = write(config, model, dict(zip(labels, params, strict=True)), length)
    for holder in (out, text_part(out, model.path)):
        for key in _capping_length_keys(holder, length):
            holder[key] = length
    return out


def with_spelling_in_force(config: dict[str, Any], spelling: str | None) -> dict[str, Any]:
    """Return the config with the given spelling in force if two disagree. It is rope_parameters, or
    rope_scaling with the keys next to it, as older transformers read them."""
    model = as_read(config)
    out = copy.deepcopy(config)
    text: dict[str, Any] = text_part(out, model.path)
    if not model.conflicts:
        return out
    if spelling is None:
        raise UsageError(
            f"{model.conflicts[0].sentence}; say which one --fix writes everywhere, with --trust"
            " rope_parameters or --trust rope_scaling"
        )
    if not text.get(spelling):
        raise UsageError(f"--trust {spelling}: config.json has no {spelling}")
    if spelling == "rope_parameters":
        text.pop("rope_scaling", None)
        return out
    # If there are flat dicts, stock reads rope_scaling first.
    for label in family(model.text_type, model.described).labels:
        inner = (text.get("rope_parameters") or {}).get(label.name)
        if isinstance(inner, dict) and label.theta and text.get(label.theta) is not None:
            inner.pop("rope_theta", None)
    return out


def check_spellings(config: dict[str, Any]) -> list[Problem]:
    """Return a problem for everything in config.json that some loader reads differently, or not at
    all. `respell` corrects spellings; it cannot correct other errors."""
    try:
        model = as_read(config)
        anew = _config_written_anew(
            config, model, [site.params for site in model.scaled_sites], None
        )
    except RopextError as error:
        return [Problem("", str(error), fixable=False)]
    text = TextConfig(text_part(config, model.path), model.text_type, model.described)
    faults = _SpellingFaults(text, model)
    problems = [
        *model.conflicts,
        *_misplaced_rope_keys(config, model),
        *_contradicting_length_faults(model),
    ]
    for edit in diff(config, anew):
        problem = faults.fault_of_edit(edit)
        # One fault may take several edits: a key in two dicts, or two keys of one dict.
        if problem is not None and problem not in problems:
            problems.append(problem)
    return problems


def _misplaced_rope_keys(config: Mapping[str, Any], model: Model) -> Iterator[Problem]:
    """Yield the spelling fault of each rope key outside a config's text part. Neither transformers
    nor an engine reads it there."""
    if not model.path:
        return
    where = ".".join(model.path)
    for key in ROPE_KEYS:
        if config.get(key) is not None:
            sentence = (
                f"{key} at top level of a {model.model_type} config is ignored; it belongs in "
                f"{where}"
            )
            yield Problem(key, sentence, fixable=False)


def _contradicting_length_faults(model: Model) -> Iterator[Problem]:
    """Yield the spelling fault of each rope dict whose factor and original length contradict
    max_position_embeddings."""
    stated = model.stated_context
    for site in model.scaled_sites:
        kind = site.params["rope_type"]
        factor = site.params.get("factor")
        if kind not in NAMED or kind == "llama3" or not factor:
            continue  # Llama 3.1 itself has 8 * 8192 with 131072
        original = site.params[ORIGINAL]
        extended = round(original * factor)
        if extended != stated:
            yield Problem(
                "max_position_embeddings",
                f"max_position_embeddings is {stated}, but {kind} with factor {factor:g} of "
                f"{original} reads {extended} tokens; transformers 4.51 to 4.55 and vLLM go by the "
                "former",
                fixable=model.context == extended,
            )


@dataclass(frozen=True)
class _SpellingFaults:
    """The faults in the spelling of a config.json: its differences from the config that ropext
    would write, as far as they mislead a loader.

    Many differences do no harm: stock reads a config without rope_parameters, and a null for an
    absent key.
    """

    text: TextConfig
    model: Model

    def fault_of_edit(self, edit: Edit) -> Problem | None:
        """Return the spelling fault in a config that an edit repairs. Return None if neither
        transformers nor an engine is affected."""
        prefix = "".join(f"{key}." for key in self.model.path)
        length = self._capping_length_fault(edit, prefix)
        if length is not None or not edit.key.startswith(prefix):
            return length
        key = edit.key.removeprefix(prefix)
        holder, _, name = key.rpartition(".")
        if holder:
            return self._rope_key_fault(edit, key, holder, name)
        if key == "rope_scaling":
            return self._legacy_dict_fault(edit)
        if key == ORIGINAL:
            return self._original_length_fault()
        if edit.before not in (ABSENT, None):
            return None
        if key == self.text.names_of("head_dim")[0]:
            return self._head_dim_fault(key)
        if key == self._legacy_theta_key() and self.text.has("rope_parameters"):
            sentence = (
                f"{key} is only in rope_parameters (a transformers 5 save drops it): "
                "transformers 4, MLX-LM and others then use their default theta"
            )
            return Problem(key, sentence, dropped=True)
        return None

    def _legacy_theta_key(self) -> str:
        """Return the config key in which transformers 4 reads the extended theta. Return "" if it
        does not know the family."""
        if self.text.row.legacy == "absent":
            return ""
        label = self.model.scaled_sites[0].label
        for each in self.text.row.labels:
            if each.name == label and each.theta:
                return each.theta
        return self.text.row.theta[0] or "rope_theta"

    def _capping_length_fault(self, edit: Edit, prefix: str) -> Problem | None:
        """Return the spelling fault of a config's length key that kept an old value, which caps
        vLLM. Return None if there is none."""
        holder, _, name = edit.key.rpartition(".")
        stated = self.model.stated_context
        in_text = holder == prefix.removesuffix(".")
        if name not in LENGTH_KEYS or not (in_text or not holder):
            return None
        if in_text and name in self.text.names_of("max_position_embeddings"):
            return None
        if type(edit.before) is not int or edit.before >= stated:
            return None
        sentence = (
            f"{edit.key} of {edit.before} caps loaders that take the smallest length (vLLM) below "
            f"{stated}"
        )
        return Problem(edit.key, sentence)

    def _legacy_dict_fault(self, edit: Edit) -> Problem | None:
        """Return the spelling fault of a config's rope_scaling that must be added, removed or given
        another type key. Return None if there is none."""
        if edit.after is ABSENT:
            if self.text.row.legacy != "absent":
                return None
            sentence = (
                "rope_scaling must be absent in this family: even null empties rope_parameters when"
                " transformers 5 reads it"
            )
            return Problem("rope_scaling", sentence)
        if isinstance(edit.before, dict):
            return self._type_key_fault()
        return self._dropped_scaling_fault()

    def _dropped_scaling_fault(self) -> Problem | None:
        """Return the spelling fault of a scaling in rope_parameters alone, which transformers 4 and
        MLX-LM ignore. Return None if there is none."""
        kind = self.model.scaled_sites[0].params["rope_type"]
        if kind == "default" or not self.text.has("rope_parameters"):
            return None
        sentence = (
            f"the {kind} scaling is only in rope_parameters: transformers 4, MLX-LM and others"
            " then ignore it"
        )
        return Problem("rope_scaling", sentence, dropped=True)

    def _rope_key_fault(self, edit: Edit, key: str, holder: str, name: str) -> Problem | None:
        """Return the spelling fault of a key in a config's rope dict. Some loader lacks the
        scaling, the type key or the original length, or the number has the wrong type. Return None
        if there is none."""
        if not self.text.values.get("rope_scaling") and holder == "rope_scaling":
            return self._dropped_scaling_fault()  # an empty dict
        if holder == "rope_scaling" and name in ("type", "rope_type"):
            return self._type_key_fault()
        if name == ORIGINAL and edit.before in (ABSENT, None):
            return self._original_length_fault()
        if name not in FORM_KEYS:
            return None
        if name in LENGTHS:
            rule = "must be a whole number"
            is_wrong = isinstance(edit.before, float)
        else:
            rule = "should be a float: vLLM refuses an integer"
            is_wrong = type(edit.before) is int and edit.before == edit.after
        if not is_wrong:
            return None
        where = ".".join(named(part) for part in key.split("."))
        return Problem(where, f"{where} is {edit.before} and {rule}")

    def _type_key_fault(self) -> Problem | None:
        """Return the spelling fault of the type key in rope_scaling. It has both names, which
        ExLlamaV2 refuses, or the name that transformers 4.57 does not accept. Return None if there
        is none."""
        legacy = self.text.values["rope_scaling"]
        if "type" in legacy and "rope_type" in legacy:
            sentence = (
                "rope_scaling has both type and rope_type, which ExLlamaV2 and transformers up to"
                " 4.42 refuse"
            )
            return Problem("rope_scaling", sentence)
        if self.text.row.legacy == "rope_type" and "rope_type" not in legacy:
            sentence = (
                "rope_scaling says type, but transformers 4.57 wants rope_type in this family"
            )
            return Problem("rope_scaling", sentence)
        return None

    def _original_length_fault(self) -> Problem | None:
        """Return the spelling fault of original_max_position_embeddings in a config. Some loaders
        read it in the rope dict, others at top level. Return None if there is none."""
        for site in self.model.scaled_sites:
            kind = site.params["rope_type"]
            if kind not in NAMED or ORIGINAL in self.text.values:
                continue
            if not self._dict_states_original():
                sentence = (
                    f"the {kind} dict lacks {ORIGINAL}: transformers takes max_position_embeddings "
                    f"({site.params[ORIGINAL]}) for it, llama.cpp and MLX-LM do not"
                )
                return Problem(ORIGINAL, sentence)
            if kind == "longrope":
                sentence = (
                    f"longrope without {ORIGINAL} at top level is read otherwise by transformers 4 "
                    "and TGI"
                )
                return Problem(ORIGINAL, sentence)
        return None

    def _dict_states_original(self) -> bool:
        """Return whether rope_scaling or rope_parameters spells original_max_position_embeddings in
        a config."""
        for key in ("rope_scaling", "rope_parameters"):
            rope = self.text.values.get(key)
            if not isinstance(rope, dict):
                continue
            for holder in (rope, *rope.values()):
                if isinstance(holder, dict) and ORIGINAL in holder:
                    return True
        return False

    def _head_dim_fault(self, name: str) -> Problem | None:
        """Return the spelling fault of a config without head_dim, or with null. transformers 5
        cannot build some scaled rope types from it. Return None if there is none."""
        if not self.text.defaults.get("head_dim_may_stay_null"):
            return None
        if not any(site.params["rope_type"] in NEED_HEAD_DIM for site in self.model.sites):
            return None
        sentence = f"{name} is not given, with which transformers 5 fails to build this scaling"
        return Problem(name, sentence)


def _capping_length_keys(holder: Mapping[str, Any], context: int) -> list[str]:
    """Return the length keys of config.json that would cap a loader below the context."""
    short = []
    for key in LENGTH_KEYS:
        length = holder.get(key)
        if type(length) is int and length < context:
            short.append(key)
    return short
