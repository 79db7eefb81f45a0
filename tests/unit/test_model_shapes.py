"""The shapes are the models': the published number of parameters, all of them in a checkpoint."""

from __future__ import annotations

from benchmarks.model_shapes import SHAPED_MODELS, parameters_of, shapes_of
from benchmarks.workload import Workload

# torchvision's documentation, and the authors' releases of BERT (with pooler) and GPT-2.
_PUBLISHED = {
    "efficientnet-b0": 5_288_548,
    "densenet121": 7_978_856,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "efficientnet-b7": 66_347_960,
    "vgg16": 138_357_544,
    "bert-base": 109_482_240,
    "gpt2": 124_439_808,
    "bert-large": 335_141_888,
}


def test_each_model_has_the_published_number_of_parameters() -> None:
    assert {model: parameters_of(model) for model in SHAPED_MODELS} == _PUBLISHED


def test_a_convolutional_model_is_saved_with_its_momentum_and_its_running_figures() -> None:
    shapes = shapes_of("efficientnet-b0")
    buffers = sum(kind == "buffer" for kind, _ in shapes)
    workload = Workload("shapes-efficientnet-b0")
    assert workload.parameters == _PUBLISHED["efficientnet-b0"]
    assert workload.tensors == buffers + 2 * (len(shapes) - buffers)
    assert buffers > 0
