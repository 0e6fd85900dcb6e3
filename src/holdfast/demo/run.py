"""The stages of the demo: verify, train, deploy."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import nn

import holdfast as hf
from holdfast.demo import data, deployment, training
from holdfast.demo.bars import Bars
from holdfast.demo.deployment import Deployment
from holdfast.demo.training import ESTIMATOR, FORMATS, Recipe, Training
from holdfast.proof.verify import Report, default_jobs, verify


@dataclass(frozen=True)
class Extent:
    """How much the demo does. ``images`` limits the training images."""

    plans: tuple[str, ...]
    images: int | None
    float_epochs: int
    quantized_epochs: int
    estimators: tuple[hf.SteKind, ...]


FULL = Extent(
    ("QuantizePerTensorPlan", "FakeQuantizeBackwardPlan", "EmbeddingPlan"), None, 24, 6, tuple(hf.SteKind)
)
#: For tests.
QUICK = Extent(("LsqInitPlan",), 192, 2, 1, (ESTIMATOR,))


@dataclass(frozen=True)
class Result:
    """What the demo found. ``deployments`` are by format, of the models trained with ``ESTIMATOR``."""

    proof: Report
    data: str
    test_images: int
    trainings: list[Training]
    deployments: dict[str, Deployment]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all bits are equal that should be."""
        deployed = all(deployment.equal for deployment in self.deployments.values())
        return self.proof.passed and deployed and all(training.equal for training in self.trainings)

    @property
    def shown(self) -> list[Training]:
        """The trainings in the table: float32, and each format with ``ESTIMATOR``."""
        return [training for training in self.trainings if training.recipe.ste in (None, ESTIMATOR)]


def run(extent: Extent, bars: Bars) -> Result:
    """Run all stages."""
    began = time.perf_counter()
    proof = verify(extent.plans, jobs=default_jobs(), progress=lambda what, done, total: bars.tell(
        f"verify {what.partition(':')[0].removesuffix('Plan')}" if ":" in what else what, done, total
    ))  # fmt: skip
    loaded = data.load(extent.images)
    with training.one_thread():
        trained = _train([Recipe()], training.classifier(), loaded, extent.float_epochs, bars)
        start = trained[0].model
        for name in FORMATS:
            recipes = [Recipe(name, ste) for ste in extent.estimators]
            trained += _train(recipes, start, loaded, extent.quantized_epochs, bars)
        deployments: dict[str, Deployment] = {}
        for one in trained:
            if one.recipe.ste is ESTIMATOR:
                bars.tell("convert, export and compare", len(deployments), len(FORMATS))
                deployments[one.recipe.format] = deployment.deploy(one.model, loaded.test_images)
    seconds = time.perf_counter() - began
    return Result(proof, loaded.name, len(loaded.test_images), trained, deployments, seconds)


def _train(
    recipes: list[Recipe], start: nn.Module, loaded: data.Data, epochs: int, bars: Bars
) -> list[Training]:
    """Train each recipe twice. All of them have the same format, and one bar."""
    many = f" with each of {len(recipes)} estimators" if len(recipes) > 1 else ""
    steps = 2 * len(recipes) * training.steps(loaded, epochs)
    bars.tell(f"train {recipes[0].format} twice{many}", 0, steps)
    return [training.train_twice(recipe, start, loaded, epochs, bars.step) for recipe in recipes]
