"""The weights of a quantized checkpoint as a GPU keeps them; the readers of formats need torch."""

from __future__ import annotations

from collections import Counter

from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.tensors import Role
from paged_backend.quantization.formats import Quantization, WeightFormat
from paged_backend.quantization.forms import WeightForm
from paged_backend.tools.plan.number_types import WeightType

_ROUNDED = {
    WeightForm.W8A8_INT8: "int8",
    WeightForm.W8A8_FP8: "fp8",
    WeightForm.W8A8_FP8_BLOCKS: "fp8",
}
_PRODUCTS = (Role.LINEAR, Role.HEAD)


def quantized_weights(
    quantization: Quantization, shape: ModelShape, rest: WeightType
) -> WeightType:
    """Return the mean size of the weights, each in the form that a GPU keeps it in.

    Args:
        quantization: which layers are quantized, and how.
        shape: shape of the model.
        rest: number type of all that is not quantized.
    """
    num_bytes: Counter[Role] = Counter()
    numbers: Counter[Role] = Counter()
    compute: Counter[str] = Counter()
    for name, spec in tensors_of(shape).items():
        if spec.role not in _PRODUCTS:
            continue
        outputs, inputs = spec.shape
        weight_format = quantization.format_of(name.removesuffix(".weight"))
        form = None if weight_format is None else _form_of(weight_format, outputs, inputs, rest)
        numbers[spec.role] += spec.num_elements
        if weight_format is None or form is None:
            num_bytes[spec.role] += spec.num_elements * rest.rest_bits // 8
        else:
            num_bytes[spec.role] += weight_format.encoding.num_bytes(form, outputs, inputs)
        if spec.role is Role.LINEAR:
            rounded = None if form is None else _ROUNDED.get(form)
            compute[rounded or rest.rest_compute] += spec.num_elements
    bits = {role: 8 * num_bytes[role] / count for role, count in numbers.items()}
    most = compute.most_common(1)[0][0]
    return WeightType(
        bits[Role.LINEAR], rest.rest_bits, most, rest.rest_compute, bits.get(Role.HEAD)
    )


def _form_of(
    weight_format: WeightFormat, outputs: int, inputs: int, rest: WeightType
) -> WeightForm | None:
    """The form on a GPU; one without FP8 units keeps as many bytes in another one."""
    forms = weight_format.encoding.forms([outputs], inputs)
    return next((form for form in forms if rest.rest_bits == 16 or form in _ROUNDED), None)
