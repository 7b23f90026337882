"""DeepSpeed's optimizer for bfloat16 weights with float32 masters, without waiting for the device."""

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import get_global_norm_of_tensors


class DeviceOnlyBF16Optimizer(BF16_Optimizer):
    """Clips, and skips a step whose gradient is not finite, on the device.

    DeepSpeed's own step asks the host about the norm twice, and the device then idles until the next step's first
    kernels come. The arithmetic is the same. It takes a fused optimizer of torch's, which is told what to skip.
    """

    @classmethod
    def serves(cls, optimizer: object) -> bool:
        """Whether DeepSpeed has made its optimizer for bfloat16, around one that can skip on the device."""
        return type(optimizer) is BF16_Optimizer and getattr(optimizer.optimizer, "_step_supports_amp_scaling", False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        counted, _ = self.get_grads_for_norm()
        norm = get_global_norm_of_tensors(counted, mpu=self.mpu, norm_type=self.norm_type)
        invalid = ~torch.isfinite(norm) | (norm < 0)  # DeepSpeed writes -1 for what is not finite
        self._global_grad_norm = norm.masked_fill(invalid, float("inf"))
        if self.clip_grad > 0:
            scale = (self.clip_grad / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(self.get_grads_for_norm(for_clipping=True), scale)
        for master, gradient in zip(
            self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True
        ):
            master.grad = gradient
        self.optimizer.found_inf = invalid.float()
        self.optimizer.step()
        self._lazy_init_hp_params_optimizer_state()
        self.update_lp_params()
        self.clear_hp_grads()
