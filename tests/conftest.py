"""One thread, here as in the processes that tests start: sums in another order are not equal bit for bit."""

import torch

torch.set_num_threads(1)
