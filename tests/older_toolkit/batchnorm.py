"""The layers."""

from __future__ import annotations

from queue import Queue

import torch
from torch import nn

_BatchNorm = nn.modules.batchnorm._BatchNorm


class Pipe:
    """Two queues. Replica 0 raises on the CPU, and the others wait for it."""

    def __init__(self) -> None:
        self.up, self.down = Queue(), Queue()

    def run_master(self, message):
        raise NotImplementedError("it needs CUDA")

    def run_slave(self, message):
        self.up.put(message)
        return self.down.get()

    def __deepcopy__(self, memo):
        return Pipe()


class Base(_BatchNorm):
    """What the layers for 1 to 3 dimensions share."""

    _corrects = False

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True):
        _BatchNorm.__init__(self, num_features, eps=eps, momentum=momentum, affine=affine)
        self._sync_master = Pipe()
        self._is_parallel = False
        self._parallel_id = None
        self._slave_pipe = None
        if self._corrects:
            self._moving_average_fraction = 1 - momentum
            self.register_buffer("_tmp_running_mean", self.running_mean.clone())
            self.register_buffer("_tmp_running_var", self.running_var.clone())
            self.register_buffer("_running_iter", torch.ones(1))

    def forward(self, x):
        if not (self._is_parallel and self.training):
            return nn.functional.batch_norm(
                *(x, self.running_mean, self.running_var, self.weight, self.bias),
                *(self.training, self.momentum, self.eps),
            )
        if self._parallel_id == 0:
            return self._sync_master.run_master(x)
        return self._slave_pipe.run_slave(x)

    def __data_parallel_replicate__(self, ctx, copy_id):
        self._is_parallel, self._parallel_id = True, copy_id
        if copy_id == 0:
            ctx.sync_master = self._sync_master
        else:
            self._slave_pipe = ctx.sync_master


class BatchNorm1dOlder(Base):
    def _check_input_dim(self, x):
        assert x.dim() in (2, 3)


class BatchNorm2dOlder(Base):
    def _check_input_dim(self, x):
        assert x.dim() == 4


class BatchNorm3dOlder(Base):
    def _check_input_dim(self, x):
        assert x.dim() == 5


class BatchNorm2dCorrected(_BatchNorm):
    """With bias-corrected running statistics, and another default."""

    _corrects = True

    def __init__(self, num_features, eps=1e-5, momentum=0.001, affine=True):
        Base.__init__(self, num_features, eps, momentum, affine)

    forward = Base.forward
    __data_parallel_replicate__ = Base.__data_parallel_replicate__
