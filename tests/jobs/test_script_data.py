"""Datasets that a script names, and the warnings of a quote about them."""

from jobs.script_data import find_datasets, warnings
from tests.factories.storage import DatasetFactory, DatasetVersionFactory

NAMING = [
    'os.path.join(os.environ["DATASETS_PATH"], "digits", "train")',
    "os.path.join(os.environ['DATASETS_PATH'],\n    'digits')",
    'os.path.join(os.environ.get("DATASETS_PATH", "/data"), "digits/raw")',
    'Path(os.environ["DATASETS_PATH"]) / "digits"',
    'Path(os.getenv("DATASETS_PATH")) / "digits"', 'os.environ["DATASETS_PATH"] + "/digits/train.npz"',
    "f\"{os.environ['DATASETS_PATH']}/digits\"", 'os.path.expandvars("$DATASETS_PATH/digits")',
    'os.path.expandvars("${DATASETS_PATH}/digits")',
]  # fmt: skip
NOT_CHOSEN = "train.py reads the dataset %s, which is not chosen."
UNKNOWN = "train.py reads the dataset %s, which your organization does not have. Upload it first."
NONE_CHOSEN = "train.py uses datasets, but none is chosen."


def test_a_dataset_named_after_the_variable_is_recognized():
    for line in NAMING:
        assert find_datasets(f"import os\ndata = {line}\n").certain == {"digits"}, line


WARNED = [
    (NAMING[0], [], [NOT_CHOSEN % "digits"]),
    (NAMING[0], ["digits"], []),
    (NAMING[0], ["words"], [NOT_CHOSEN % "digits"]),
    (NAMING[0].replace("digits", "faces"), [], [UNKNOWN % "faces"]),
    ('root = os.environ["DATASETS_PATH"]\ndata = root + "/words"', [], [NOT_CHOSEN % "words"]),
    ('root = os.environ["DATASETS_PATH"]\nfor name in os.listdir(root): print(name)', [], [NONE_CHOSEN]),
    ('for name in os.environ["DATASETS"].split(","): print(name)', [], [NONE_CHOSEN]),
    ('root = os.environ["DATASETS_PATH"]', ["words"], []),
    ('# os.environ["DATASETS_PATH"]\nprint("digits")', [], []),
    ("\0", [], []),
]  # fmt: skip


def test_the_quote_warns_of_datasets_that_were_not_chosen(customer):
    for name in ("digits", "words"):
        DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name=name))
    for text, chosen, expected in WARNED:
        customer.write("train.py", text)
        quote = customer.quote(datasets=chosen)
        assert warnings(customer.organization, quote.purchase) == expected, text


def test_a_hostile_script_is_read_in_linear_time(customer):
    for text in ("(" * 900_000, "DATASETS_PATH" + "/a" * 400_000, 'DATASETS_PATH"' + " " * 900_000, "[" * 900_000):
        customer.write("train.py", text)  # an exponential pattern would not end
        assert isinstance(warnings(customer.organization, customer.form()), list)
