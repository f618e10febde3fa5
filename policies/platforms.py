"""The families of hardware that Tidegate knows, with their limits and where each figure comes from.

`emulated_slowdown` and `emulated_budget_bytes` are how this machine's CPU plays the device when there is none: the time of a
shard is stretched to `emulated_slowdown` times that of one core, and shards may use no more than the budget. They
are chosen to keep the devices' order, not to reproduce their speed, and are always labelled `emulated`.
"""

from __future__ import annotations

import msgspec

from sla.errors import InvalidInputError


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """Known limits of one family of devices."""

    name: str
    description: str
    int8_tops: float | None
    power_w: float
    providers: tuple[str, ...]
    """onnxruntime execution providers (or `rknn`) to try, best first; the CPU is always last."""
    emulated_slowdown: float
    emulated_budget_bytes: int
    source: str
    is_cloud: bool = False


_MB = 1 << 20

PLATFORMS: dict[str, Platform] = {
    p.name: p
    for p in (
        Platform(name="rk3588", description="Rockchip RK3588, 3 NPU cores", int8_tops=6.0, power_w=8.0, providers=("rknn",),
                 emulated_slowdown=2.2, emulated_budget_bytes=512 * _MB, source="vendor figure: 6 TOPS INT8"),
        Platform(name="rk3576", description="Rockchip RK3576, 2 NPU cores", int8_tops=6.0, power_w=6.0, providers=("rknn",),
                 emulated_slowdown=2.5, emulated_budget_bytes=512 * _MB, source="vendor figure: 6 TOPS INT8"),
        Platform(name="ascend310p", description="Huawei Ascend 310P", int8_tops=None, power_w=20.0, providers=("CANNExecutionProvider",),
                 emulated_slowdown=1.6, emulated_budget_bytes=1024 * _MB, source="estimate: faster than rk3588, slower than the cloud"),
        Platform(name="horizon-j5", description="Horizon Journey 5", int8_tops=None, power_w=15.0, providers=(),
                 emulated_slowdown=2.0, emulated_budget_bytes=512 * _MB, source="estimate"),
        Platform(name="qcs8550", description="Qualcomm QCS8550", int8_tops=None, power_w=8.3, providers=("QNNExecutionProvider",),
                 emulated_slowdown=1.8, emulated_budget_bytes=1024 * _MB, source="printed: 8.3 W in a joint OCR + VQA task"),
        Platform(name="imx93", description="NXP i.MX93, Ethos-U65", int8_tops=0.7, power_w=2.0, providers=(),
                 emulated_slowdown=10.0, emulated_budget_bytes=96 * _MB, source="printed: 0.7 TOPS INT8, 12.8 GB/s"),
        Platform(name="jetson-orin", description="NVIDIA Jetson Orin", int8_tops=None, power_w=15.2,
                 providers=("TensorrtExecutionProvider", "CUDAExecutionProvider"),
                 emulated_slowdown=1.5, emulated_budget_bytes=2048 * _MB, source="printed: 15.2 W in a joint OCR + VQA task"),
        Platform(name="apple-ane", description="Apple Neural Engine", int8_tops=None, power_w=22.8, providers=("CoreMLExecutionProvider",),
                 emulated_slowdown=1.5, emulated_budget_bytes=2048 * _MB, source="printed: 22.8 W, M2 Ultra"),
        Platform(name="x86", description="Any machine with a CPU", int8_tops=None, power_w=30.0, providers=("OpenVINOExecutionProvider",),
                 emulated_slowdown=1.0, emulated_budget_bytes=2048 * _MB, source="measured here"),
        Platform(name="ray", description="A Ray actor in the cloud", int8_tops=None, power_w=60.0, providers=("CUDAExecutionProvider",),
                 emulated_slowdown=1.0, emulated_budget_bytes=4096 * _MB, source="measured here", is_cloud=True),
    )
}  # fmt: skip


def platform(name: str) -> Platform:
    """The platform of that name. Raises InvalidInputError that lists the known ones."""
    try:
        return PLATFORMS[name]
    except KeyError:
        raise InvalidInputError(
            f"{name!r} is not a platform that Tidegate knows; known are {', '.join(PLATFORMS)}.",
            found=name, accepted=", ".join(PLATFORMS),
        ) from None  # fmt: skip
