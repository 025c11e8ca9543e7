from . import notebook as notebook
from .config.engine import EngineSettings as EngineSettings
from .engine.checkpoint.loading import load_checkpoint as load_checkpoint
from .engine.checkpoint.saving import save_checkpoint as save_checkpoint
from .engine.comm.communicator import Communicator as Communicator
from .engine.model import ShardedModel as ShardedModel
from .engine.optim.adamw import ShardedAdamW as ShardedAdamW
from .engine.optim.loss_scale import LossScale as LossScale
from .engine.optim.sgd import ShardedSGD as ShardedSGD
from .errors import UserError as UserError
from .hf.load.model import load_model as load_model
from .hf.load.model import load_weights as load_weights
from .hf.reading import gathered_parameters as gathered_parameters
from .hf.reading import root_parameters as root_parameters
from .hf.save.model import save_model as save_model
from .hf.sharding import shard as shard
from .hf.sharding import units_of as units_of
from .hf.trainer.accelerator import Accelerator as Accelerator
from .hf.trainer.arguments import ArgumentsMixin as ArgumentsMixin
from .hf.trainer.arguments import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
from .hf.trainer.arguments import TrainingArguments as TrainingArguments
from .hf.trainer.trainer import Seq2SeqTrainer as Seq2SeqTrainer
from .hf.trainer.trainer import Trainer as Trainer
from .hf.trainer.trainer import TrainerMixin as TrainerMixin
from .spec.strategy import Strategy as Strategy
from .train.preview import preview as preview

__version__: str
