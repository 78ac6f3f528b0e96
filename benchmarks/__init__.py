"""What the layers and the replicas cost, as ratios side by side; see README.md beside this."""

import warnings

from replication import UnsynchronizedWarning

# Plain BatchNorm in replicas is what several figures are relative to.
warnings.filterwarnings("ignore", category=UnsynchronizedWarning)
