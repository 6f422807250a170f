import nursery
import pytest

_MISSING = """
    import sys

    sys.modules[sys.argv[1]] = None
    import trawl.observe

    try:
        getattr(trawl.observe, sys.argv[2])("1" if sys.argv[2] != "PrometheusSink" else 1)
    except ModuleNotFoundError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("library", "sink", "extra"),
    [
        ("mlflow", "MLflowSink", "mlflow"),
        ("prometheus_client", "PrometheusSink", "prometheus"),
        ("tensorboard", "TensorBoardSink", "tensorboard"),
        ("wandb", "WandbSink", "wandb"),
    ],
)
def test_the_extra_is_named(library, sink, extra):
    done = nursery.run(_MISSING, library, sink)
    assert f"pip install 'trawl-rl[{extra}]'" in done.stdout, done.stderr


def test_libraries_are_imported_when_they_are_used():
    done = nursery.run(
        """
        import sys
        import trawl, trawl.observe
        print({"mlflow", "prometheus_client", "tensorboard", "wandb"} & set(sys.modules))
        """
    )
    assert done.stdout == "set()\n"
