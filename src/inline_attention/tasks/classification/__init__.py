"""Image classification: the task of `inline train`, recipes, evaluation, prediction and trained classifiers."""

from inline_attention.tasks.classification.classifier import Classifier, load_classifier
from inline_attention.tasks.classification.config import TrainConfig, load_config
from inline_attention.tasks.classification.evaluation import EvalResult, evaluate
from inline_attention.tasks.classification.multi_label import MultiLabelResult, evaluate_multi_label
from inline_attention.tasks.classification.prediction import Guess, Prediction, predict
from inline_attention.tasks.classification.task import Classification

__all__ = [
    "Classification",
    "TrainConfig",
    "load_config",
    "Classifier",
    "load_classifier",
    "EvalResult",
    "evaluate",
    "MultiLabelResult",
    "evaluate_multi_label",
    "Guess",
    "Prediction",
    "predict",
]
