from .checkpoint import SavedCheckpoint as SavedCheckpoint
from .checkpoint import list_checkpoints as list_checkpoints
from .checkpoint import pretrained as pretrained
from .engine import TrainState as TrainState
from .errors import BudgetError as BudgetError
from .errors import CheckpointError as CheckpointError
from .errors import HostMemoryError as HostMemoryError
from .errors import InputError as InputError
from .errors import InternalError as InternalError
from .errors import JaxFerryError as JaxFerryError
from .errors import NonFiniteError as NonFiniteError
from .errors import PartitionError as PartitionError
from .errors import ScratchError as ScratchError
from .errors import StateError as StateError
from .errors import TaskError as TaskError
from .modes import GradientPlace as GradientPlace
from .modes import Mode as Mode
from .optimizer.optimizers import adam as adam
from .optimizer.optimizers import adamw as adamw
from .optimizer.optimizers import lion as lion
from .optimizer.optimizers import sgd as sgd
from .processes import distributed as distributed
from .training import TrainStep as TrainStep
from .training import train_step as train_step

__version__: str
