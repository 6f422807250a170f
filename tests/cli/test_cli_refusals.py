"""Whatever is wrong is one line on stderr and exit code 2, and leaves nothing behind."""

import os
from pathlib import Path

import cli_envs
import nursery
import pytest
from cli_parts import refused, trawl

from trawl.extras.cli.errors import describe, message_of, one_line

FILES = {
    "file": "mine",
    "full/f.py": "mine",
    "there.json": "{}",
    "uses_it.py": "import absent",
    "opens_it.py": "open('absent')",
}
# Packages that the environments and formats in the commands need.
NEEDS = ("gymnax", "vmas", "torchrl", "minari", "parquet", "mpe2", "prometheus", "tensorboard")
PENDULUM = "collect Pendulum-v1"
EVALUATE = "evaluate Pendulum-v1"
POLICY = f"{PENDULUM} --policy cli_policies:"
INFORMING = "collect cli_envs:Informing --info-keys"
BROKEN = ": RuntimeError: no licence"

REFUSALS = [
    # --- numbers
    (f"{PENDULUM} --frames 0", "--frames must be at least 1, but it is 0"),
    (f"{PENDULUM} --frames-per-batch 0", "--frames-per-batch must be at least 1, but"),
    (f"{PENDULUM} --max-frames-per-traj 0", "--max-frames-per-traj must be at least 1, but"),
    (f"{PENDULUM} --envs 0", "--envs must be at least 1"),
    (f"{PENDULUM} --seed -1", "--seed must be between 0 and 2**63 - 1, but it is -1"),
    (f"{PENDULUM} --workers -1", "--workers must be at least 0, but it is -1"),
    (f"{PENDULUM} --frame-stack 1", "--frame-stack must be at least 2, but it is 1"),
    (f"{PENDULUM} --log-every 0", "--log-every must be above 0 seconds, but it is 0.0"),
    (f"{PENDULUM} --log-every nan", "--log-every must be above 0 seconds, but it is nan"),
    (f"{EVALUATE} --episodes 0", "--episodes must be at least 1, but it is 0"),
    (f"{EVALUATE} --workers -1", "--workers must be at least 0, but it is -1"),
    (f"{EVALUATE} --seed -3", "--seed must be between 0 and"),
    (f"{EVALUATE} --frame-stack 1", "--frame-stack must be at least 2, but it is 1"),
    ("tune Pendulum-v1 --budget 0.5", "--budget must be at least 1, but it is 0.5"),
    ("tune Pendulum-v1 --max-envs 0", "--max-envs must be at least 1"),
    ("tune Pendulum-v1 --seed -1", "--seed must be between 0"),
    ("tune Pendulum-v1 --frame-stack 1", "--frame-stack must be at least 2, but it is 1"),
    ("tune Pendulum-v1 --budget 2 --frames-per-batch 1000000000", ": budget must be at least"),
    # --- options that don't go together
    (f"{PENDULUM} --envs 4 --env-processes 3", "--env-processes must divide the number of"),
    (f"{PENDULUM} --env-processes -1", "--env-processes must divide the number of"),
    (f"{PENDULUM} --envs 2 --env-processes 4", "(--envs), which is 2, but it is 4"),
    (f"{PENDULUM} --envs 2 --env-processes 2 --workers 2", "--env-processes can't be used with --"),
    (f"{PENDULUM} --async", "--async needs worker processes: pass --workers"),
    (f"{PENDULUM} --backend ray", "--backend ray needs workers: pass --workers"),
    (f"{PENDULUM} --deterministic", "--deterministic needs a policy, but the actions are random"),
    (f"{PENDULUM} --resume", "--resume continues the dataset in --out: pass --out too"),
    (f"{EVALUATE} --backend ray", "--backend ray needs workers"),
    ("collect cli_envs:spends_steps --max-frames-per-traj 5 --frames 30",
     "--max-frames-per-traj=5 can't be used"),
    ("collect FrozenLake-v1 --normalize-observations", "--normalize-observations "),
    # --- environments
    ("collect NoSuchThing-v0", "environment NoSuchThing-v0 can't be made: Environment `NoSuchThing`"
     " doesn't exist. ENV is an id of Gymnasium such as CartPole-v1, one of"),
    ("check CartPol-v1", "environment CartPol-v1 can't be made: Environment `CartPol` doesn't exist"
     ". Did you mean: `CartPole`?"),
    ("check gymnax:Nope-v1", "environment gymnax:Nope-v1 can't be made: gymnax has no environment"),
    ("check nowhere:Thing-v0", "environment nowhere:Thing-v0 can't be made: 'nowhere:Thing-v0'"
     " names no library that Trawl knows, and 'nowhere' is not a module. Before the colon stands"),
    ("evaluate NoSuch-v1", "environment NoSuch-v1 can't be made"),
    ("tune NoSuch-v1", "environment NoSuch-v1 can't be made"),
    (f"collect {cli_envs.__file__}:spend_steps",
     "/cli_envs.py has no attribute 'spend_steps'; did you mean spends_steps?"),
    ("collect cli_envs:NUMBER", ": NUMBER must be a function, but it is int"),
    ("collect cli_envs:fails", "can't be made: ZeroDivisionError: no environment today"),
    ("collect jumanjy:make", "'jumanjy' is not a module; did you mean jumanji?"),
    ("collect nowhere.py:make", "nowhere.py: No such file or directory"),
    (f"{PENDULUM} --env-kwargs {{", "--env-kwargs must be a JSON object, but it is not valid JSON"),
    (f"{PENDULUM} --env-kwargs [1]", "--env-kwargs must be a JSON object, such as"),
    (f'{PENDULUM} --env-kwargs {{"gg":1}}', "environment Pendulum-v1 can't be made"),
    ('collect cli_envs:pendulum --env-kwargs {"g":1}', "can't be made: TypeError"),
    *((f"{command} cli_envs:untrained", "environment cli_envs:untrained can't be made: TypeError: "
       "ENV made an object that is not an") for command in ("collect", "evaluate")),
    ("collect cli_envs:Unseeded --format parquet", "cli_envs:Unseeded failed: TypeError: "),
    # --- environments that fail are blamed, and not the policy
    *((f"collect cli_envs:{env} {more} --policy {policy}",
       f"environment cli_envs:{env} failed{BROKEN}")
      for policy, env, more in [
          ("random", "Broken", ""), ("cli_envs:untrained", "Broken", ""),
          ("random", "Broken", "--workers 1"), ("cli_envs:untrained", "Broken", "--workers 1"),
          ("cli_envs:untrained", "Broken", "--envs 2"), ("cli_envs:untrained", "broken_vector", ""),
          ("random", "Broken", '--format parquet --env-kwargs {"text":true}'),
          ("cli_envs:untrained", "broken_parallel", ""), ("random", "broken_torchrl", ""),
      ]),
    *((f"evaluate cli_envs:Broken --policy {policy} --workers {workers}",
       f"environment cli_envs:Broken failed{BROKEN}")
      for policy, workers in [("random", 0), ("cli_envs:untrained", 1)]),
    # --- infos, and what a format can't hold
    ("collect CartPole-v1 --info-keys absent", "info_keys has 'absent', but the info of"),
    ("collect gymnax:CartPole-v1 --info-keys absent", "of gymnax CartPole-v1 has only ['disc"),
    ("collect cli_envs:with_infos --info-keys said", "pass info_keys to the object that makes"),
    (f"{INFORMING} object --format parquet", "without a fixed shape (('info', 'object')"),
    (f"{INFORMING} said", "can't hold: pass --format parquet"),
    ('collect FrozenLake-v1 --info-keys prob --env-kwargs {"info_keys":["prob"]}', "one of them"),
    ("collect cli_envs:Saying", "has text ('said'), which the format memmap can't hold: pass --"),
    ('collect cli_envs:Saying --env-kwargs {"kind":"sequence"}', "without a fixed shape"),
    *((f"collect {env} --format minari",
       "one reward for each step: pass --format memmap or parquet")
      for env in ("pettingzoo:mpe2/simple_spread_v3", "vmas:balance")),
    # --- policies
    (f"{PENDULUM} --policy none.pt2", "--policy none.pt2: there is no such file"),
    (f"{PENDULUM} --policy none:here", "none:here: No module named 'none' (not in this folder"),
    (f"{PENDULUM} --policy absent.py:make", "(not in this folder, and not installed)"),
    (f"{PENDULUM} --policy uses_it:make", ": importing uses_it failed: ModuleNotFoundError: "),
    (f"{PENDULUM} --policy opens_it.py:make", "importing opens_it.py failed: FileNotFoundError: "),
    (f"{PENDULUM} --policy file", "file is not a policy"),
    (f"{PENDULUM} --policy full/f.py", "program of torch.export nor a TorchScript archive; to name "
     "a function in it, pass full/f.py:NAME"),
    (f"{POLICY}two", "must take the environment or no argument, but it takes one, other"),
    (f"{POLICY}breaks --workers 2", "--policy cli_policies:breaks failed: RuntimeError: no luck"),
    (f"{POLICY}wrong --workers 2", ": ValueError: policy wrote 'action' with shape (7,)"),
    (f"{POLICY}nothing", "returned None instead of a policy; for random actions pass --policy ran"),
    (f"{POLICY}text", "policy must be callable"),
    (f"{POLICY}nowhere", "has no attribute 'nowhere'"),
    (f"{EVALUATE} --policy none.pt2", "--policy none.pt2: there is no such file"),
    ("evaluate CartPole-v1 --policy cli_policies:Net", "--policy cli_policies:Net"),
    (f"{EVALUATE} --policy cli_policies:fails", "the evaluation failed: ValueError: no more"),
    ("tune Pendulum-v1 --policy nowhere", "--policy nowhere: there is no such file; pass ran"),
    # --- places
    (f"{PENDULUM} --out file", "file already exists, and is not overwritten: pass another --out"),
    (f"{PENDULUM} --out full", "full already exists"),
    (f"{PENDULUM} --out full --resume", "and is not a dataset that can be continued: pass"),
    (f"{PENDULUM} --out file/d", "file/d can't be written: Not a directory"),
    (f"{PENDULUM} --trace=", "--trace must name a file, such as 'run.json.gz', but"),
    (f"{PENDULUM} --trace no/x.gz --workers 2", "no/x.gz can't be written: No such file or"),
    (f"{EVALUATE} --out there.json", "there.json already exists: pass another --out"),
    (f"{EVALUATE} --normalization x", "--normalization x: there is no such file as x"),
    (f"{EVALUATE} --normalization full", "there is no such file as full/normalization.pt"),
    (f"{EVALUATE} --normalization file", "file can't be read: "),
    ("show nowhere", "nowhere is not a dataset: there is no such folder"),
    ("show .", ". is not a dataset: it has no _dataset.json"),
    # --- logs
    (f"{PENDULUM} --log x.csv", "x.csv doesn't begin with one of csv:, mlflow:, prometheus:, "),
    (f"{PENDULUM} --log tensorbord:x", "tensorboard:, wandb:; did you mean tensorboard?"),
    (f"{PENDULUM} --log csv", "--log csv needs a value: --log csv:FILE"),
    (f"{PENDULUM} --log tensorboard:", "--log tensorboard: needs a value: --log tensorboard:DIR"),
    (f"{PENDULUM} --log csv:no/x.csv", "--log can't start: no/x.csv: No such file or directory"),
    (f"{PENDULUM} --log prometheus:70000", "--log prometheus:70000: port must be at most 65535"),
    (f"{PENDULUM} --log prometheus:http", "PORT must be a number: pass prometheus:PORT"),
]  # fmt: skip


def tree():
    return {str(path) for path in Path().rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize(("command", "words"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_what_is_wrong_is_one_line(command, words):
    for name in NEEDS:
        if name in command:
            pytest.importorskip(
                {"parquet": "pyarrow", "prometheus": "prometheus_client"}.get(name, name)
            )
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    before = tree()
    assert words in refused(*command.split())
    assert tree() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_named():
    os.mkdir("locked", 0o500)
    said = refused("collect", "Pendulum-v1", "--out", "locked/d")
    assert said == "locked/d can't be written: Permission denied\n"


_WITHOUT = """
import sys

sys.modules[sys.argv.pop(1)] = None
from trawl.extras.cli import main

sys.exit(main())
"""


@pytest.mark.parametrize(
    ("package", "command", "words"),
    [
        ("tensorboard", ["collect", "CartPole-v1", "--log", "tensorboard:x"], "[tensorboard]"),
        ("matplotlib", ["show", "d", "--plot", "a.png"], "--plot a.png: plots need matplotlib: "),
    ],
)  # fmt: skip
def test_a_missing_library_names_its_extra(package, command, words):
    if command[0] == "show":
        trawl("collect", "Pendulum-v1", "--frames", 200, "--out", "d")
    before = tree()
    done = nursery.run(_WITHOUT, package, *command, cwd=".")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr
    assert "pip install 'trawl-rl[" in done.stderr
    assert tree() == before


def test_show_says_why_it_can_not_plot_or_report():
    trawl("collect", "Pendulum-v1", "--frames", 100, "--out", "short")
    trawl("collect", "Pendulum-v1", "--frames", 200, "--out", "d")
    for command, words in (
        ("short --plot a.png", "no episode has ended"),
        ("d --plot a.foo", "--plot a.foo: Format 'foo' is not supported"),
        ("d --plot no/a.png", "no/a.png can't be written: No such file or directory"),
        ("d --html no/a.html", "no/a.html can't be written: "),
        ("d --html .", ". can't be written: "),
    ):
        assert words in refused("show", *command.split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "usage: trawl"),
        ("collect", "help"),
        ("collect Pendulum-v1 --frames many", "help"),
        ("collect Pendulum-v1 --frame-stack four", "be an integer, but it is 'four'"),
        ("collect Pendulum-v1 --log-every often", "must be a number, but it is 'often'"),
        ("--nothing", "help"),
        ("gather", "help"),
        ("collect Pendulum-v1 --workers 2 --sync --async", "not allowed together"),
        ("tune Pendulum-v1 --sync --async", "not allowed together"),
    ],
)
def test_wrong_options_are_explained(command, words):
    code, out, err = trawl(*command.split())
    assert (code, bool(out)) == (2, not command)
    assert words in out + err


def test_a_message_is_one_line():
    assert one_line("\n  \x1b[33mWARN: so\x1b[0m  \nand so\n") == "WARN: so"
    assert one_line("") == ""
    assert message_of(KeyError("it's not there")) == "it's not there"
    error = ValueError("so")
    error.__notes__ = ["at step 3"]
    assert describe(error) == "ValueError: so (at step 3)"
    assert describe(ValueError()) == "ValueError"
