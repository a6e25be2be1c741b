"""A loss of pytorch_metric_learning over the outputs of all ranks."""

from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

nt_xent = DistributedLossWrapper(losses.NTXentLoss())
