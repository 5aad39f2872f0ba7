"""What a GPU says of itself while it works: clock, power and temperature, by NVIDIA's NVML."""

import ctypes
import statistics

import torch

CLOCK_SM, POWER_INSTANT = 1, 186  # as nvml.h numbers them


class Value(ctypes.Union):
    _fields_ = (("unsigned", ctypes.c_uint), ("long", ctypes.c_ulonglong))


class Field(ctypes.Structure):
    """nvmlFieldValue_t"""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_int),
        ("result", ctypes.c_int),
        ("value", Value),
    )


class Sensors:
    """`sample()` reads MHz of the multiprocessors, watts at this moment and degrees Celsius; None
    for what the driver does not tell. A sample takes some microseconds and waits for nothing."""

    NAMES = ("MHz", "watts", "degrees")

    def __init__(self):
        self.device = None
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        device = ctypes.c_void_p()
        if self.nvml.nvmlInit_v2() == 0 and (
            self.nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device)) == 0
        ):
            self.device = device

    def sample(self):
        if self.device is None:
            return None, None, None
        clock, heat = ctypes.c_uint(), ctypes.c_uint()
        power = Field(field=POWER_INSTANT)
        found = (
            self.nvml.nvmlDeviceGetClockInfo(self.device, CLOCK_SM, ctypes.byref(clock)),
            self.nvml.nvmlDeviceGetFieldValues(self.device, 1, ctypes.byref(power)) | power.result,
            self.nvml.nvmlDeviceGetTemperature(self.device, 0, ctypes.byref(heat)),
        )
        values = (clock.value, power.value.unsigned / 1e3, heat.value)
        return tuple(v if status == 0 else None for v, status in zip(values, found, strict=True))


def medians(samples):
    """{name: median of the samples} of those that the driver tells."""
    columns = zip(*samples, strict=True)
    found = {
        name: [value for value in column if value is not None]
        for name, column in zip(Sensors.NAMES, columns, strict=True)
    }
    return {name: statistics.median(values) for name, values in found.items() if values}
