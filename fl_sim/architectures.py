"""Architectures of other libraries by name: ``torchvision:resnet18``, ``timm:NAME`` and ``hf:PATH``.

Each class here builds the models of one library (the interface is fl_sim.foreign_models.ModelSource). The classes are
registered as entry points in the group ``fl_sim.model``. Nothing is downloaded. A library is imported only when one of
its models is used.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.own_code import in_one_line, package_folders
from fl_sim.types import Params

_SMALL: Final = 64
"""Images with a smaller side, in pixels, cause a warning: these architectures were made for 224x224 pixels."""

_OWN_TOKENS: Final = 0.9
"""A tokenizer with at least this share of a model's tokens is treated as the model's own tokenizer."""

_CONFIG: Final = "config.json"


@dataclass(frozen=True)
class ImageModel:
    """An image classifier from a library, with random weights and a head for the classes of the data set."""

    name: str
    kind: str

    def files(self) -> tuple[Path, ...]:
        """Return an empty tuple: the weights are random, so there is no file."""
        return ()

    def weights(self) -> Params:
        """Return an empty dictionary: the weights are random."""
        return {}

    def note(self, input_shape: tuple[int, ...], vocabulary: int) -> str:
        """Return a warning if the images are too small for this model."""
        del vocabulary
        height, width = input_shape[1:]
        if min(height, width) >= _SMALL:
            return ""
        return (
            f"{self.kind}:{self.name} was made for images of about 224x224 pixels, and reduces images of "
            f"{height}x{width} to very few pixels: take model=resnet, which is made for small images"
        )


@dataclass(frozen=True)
class TorchVision(ImageModel):
    """An image classifier from torchvision, such as resnet18.

    The number of input channels of the first convolution is the number of channels of the images.
    """

    kind: Literal["torchvision"] = "torchvision"

    def build(self, input_shape: tuple[int, ...], num_classes: int, vocabulary: int) -> nn.Module:
        """Return the model with random weights.

        Raises UserError for an unknown name, or if the records are no images.
        """
        channels, height, width = _image(f"torchvision:{self.name}", input_shape, vocabulary)
        from torchvision import models  # noqa: PLC0415 (seconds to import)

        if self.name not in (names := models.list_models(module=models)):
            raise _unknown("torchvision", self.name, names)
        options: dict[str, Any] = {"num_classes": num_classes}
        if self.name.startswith("vit_"):
            if height != width:
                raise UserError(f"model torchvision:{self.name} needs square images, these are {height}x{width}")
            options["image_size"] = height
        if self.name in {"googlenet", "inception_v3"}:
            options["init_weights"] = True
        model: nn.Module = models.get_model(self.name, weights=None, **options)
        _take_channels(model, channels)
        return model


@dataclass(frozen=True)
class Timm(ImageModel):
    """An image classifier from timm (PyTorch Image Models), for images of any size."""

    kind: Literal["timm"] = "timm"

    def build(self, input_shape: tuple[int, ...], num_classes: int, vocabulary: int) -> nn.Module:
        """Return the model with random weights.

        Raises UserError for an unknown name, or if the records are no images.
        """
        channels, height, width = _image(f"timm:{self.name}", input_shape, vocabulary)
        try:
            import timm  # noqa: PLC0415 (an extra)
        except ImportError as error:
            raise _missing("timm", f"timm:{self.name}", "timm") from error
        if not timm.is_model(self.name):
            raise _unknown("timm", self.name, timm.list_models())
        # vision transformers (unlike convolutional networks) must be built for the size of the images
        is_fixed = timm.get_pretrained_cfg_value(self.name, "fixed_input_size")
        sized = {"img_size": (height, width)} if is_fixed else {}
        model: nn.Module = timm.create_model(
            self.name, pretrained=False, num_classes=num_classes, in_chans=channels, **sized
        )
        return model


@dataclass(frozen=True)
class HuggingFace:
    """A model of transformers in a local folder, or in a folder of an installed package.

    If the folder has a model for sequence classification, this model is used. Otherwise the model has three parts: the
    folder's encoder, the mean of its outputs over all tokens (as in sentence transformers), and a linear head. The
    initial weights are those in the folder.
    """

    name: str
    kind: Literal["hf"] = "hf"

    def build(self, input_shape: tuple[int, ...], num_classes: int, vocabulary: int) -> nn.Module:
        """Return the model with random weights. Raises UserError if the records are not sequences of tokens."""
        transformers, folder = self._library(), self._folder()
        config = self._config(transformers, folder)
        if not vocabulary:
            raise UserError(
                f"model hf:{self.name} reads tokens, and these records have shape {input_shape}: give texts, as "
                "data=csv:PATH data.text=COLUMN, or set another model"
            )
        with _quiet(transformers):
            if self._is_classifier(config):
                config.num_labels = num_classes
                auto = transformers.AutoModelForSequenceClassification
                model: nn.Module = auto.from_config(config, attn_implementation="eager")
            else:
                body = transformers.AutoModel.from_config(config, attn_implementation="eager")
                model = MeanOfTokens(body, config.hidden_size, num_classes)
        return model

    def files(self) -> tuple[Path, ...]:
        """Return the paths of the files that define the model: its configuration and its weights."""
        folder = self._folder()
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise UserError(
                f"model hf:{self.name}: {folder} has no weights in a safetensors file: save the model there by "
                "save_pretrained, or set model.weights=none for random weights"
            )
        return (folder / _CONFIG, *found)

    def weights(self) -> Params:
        """Return the pretrained weights in the folder, as {parameter name in the model of ``build``: tensor}.

        If ``build`` adds a new linear head to the encoder, the result has no weights for this head.
        """
        transformers, folder = self._library(), self._folder()
        is_classifier = self._is_classifier(self._config(transformers, folder))
        auto = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModel
        try:
            with _quiet(transformers):
                model = auto.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise UserError(f"model hf:{self.name} cannot be read from {folder} ({in_one_line(error)})") from error
        body = model if is_classifier else MeanOfTokens(model, 1, 1)
        named = body.state_dict()
        return {name: value for name, value in named.items() if is_classifier or not name.startswith("head.")}

    def note(self, input_shape: tuple[int, ...], vocabulary: int) -> str:
        """Return a warning if the records were probably tokenized by another tokenizer than the model's own."""
        del input_shape
        known = getattr(self._config(self._library(), self._folder()), "vocab_size", 0)
        if vocabulary >= _OWN_TOKENS * known:
            return ""
        return (
            f"model hf:{self.name} has {known:,} tokens, and the data have {vocabulary:,}: its weights are useful only "
            f"with its own tokenizer (data.tokenizer={self.name})"
        )

    def _library(self) -> Any:
        try:
            import transformers  # noqa: PLC0415 (an extra; seconds to import)
        except ImportError as error:
            raise _missing("transformers", f"hf:{self.name}", "hf") from error
        return transformers

    def _folder(self) -> Path:
        """Return the folder with config.json. Raises UserError if there is none: nothing is downloaded."""
        place = Path(self.name).expanduser()
        for folder in [place] if place.is_dir() else package_folders(self.name):
            for found in (folder, *(inner for inner in sorted(folder.glob("*")) if inner.is_dir())):
                if (found / _CONFIG).is_file():
                    return found
        raise UserError(
            f"model hf:{self.name}: no folder and no installed package of this name contains {_CONFIG}, and "
            "nothing is downloaded: give the folder that save_pretrained wrote, or install the package"
        )

    def _config(self, transformers: Any, folder: Path) -> Any:
        try:
            return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"model hf:{self.name}: {folder} holds no known model ({in_one_line(error)})") from error

    @staticmethod
    def _is_classifier(config: Any) -> bool:
        return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


class MeanOfTokens(nn.Module):
    """An encoder of transformers with mean pooling of its last states over the tokens of a text, and a linear head."""

    def __init__(self, body: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        if getattr(body, "pooler", None) is not None:
            # removes the pooler: it is a layer for pretraining, and the mean over tokens does not use its output
            body.register_module("pooler", None)
        self.body = body
        self.config = body.config
        self.head = nn.Linear(width, num_classes)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Map token IDs (batch, length) and their mask, 1 for tokens and 0 for padding, to logits (batch, classes)."""
        states = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        shares = attention_mask.unsqueeze(-1).to(states.dtype)
        logits: torch.Tensor = self.head((states * shares).sum(1) / shares.sum(1).clamp(min=1))
        return logits


def _missing(library: str, model: str, extra: str) -> UserError:
    return UserError(
        f"model {model} needs the library {library}, which is not installed: pip install 'fl-sim[{extra}]'"
    )


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Switch off the warnings and progress bars of transformers within a ``with`` block.

    These outputs are not needed, because fl-sim itself checks the model.
    """
    say, before = transformers.utils.logging, transformers.utils.logging.get_verbosity()
    say.set_verbosity(logging.ERROR)
    say.disable_progress_bar()
    try:
        yield
    finally:
        say.set_verbosity(before)
        say.enable_progress_bar()


def _image(model: str, input_shape: tuple[int, ...], vocabulary: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or vocabulary:
        raise UserError(f"model {model} needs images, these records have shape {input_shape}: set model=mlp")
    return input_shape[0], input_shape[1], input_shape[2]


def _unknown(library: str, name: str, names: list[str]) -> UserError:
    near = get_close_matches(name, names, n=3)
    meant = f"did you mean {' or '.join(near)}?" if near else f"it has {len(names)} models, such as {names[0]}"
    return UserError(f"model {library}:{name}: {library} has no classifier of this name; {meant}")


def _take_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution of ``model`` if it does not take images with ``channels`` channels.

    The models of torchvision take three channels. The new convolution has random weights.
    """
    name, first = next((name, part) for name, part in model.named_modules() if isinstance(part, nn.Conv2d))
    if first.in_channels == channels:
        return
    parts = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    sizes: dict[str, Any] = {part: getattr(first, part) for part in parts}
    other = nn.Conv2d(channels, first.out_channels, bias=first.bias is not None, **sizes)
    place, _, last = name.rpartition(".")
    setattr(model.get_submodule(place), last, other)
