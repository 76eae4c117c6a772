"""References to variables in arguments, and the variables that a rank inherits."""

import os

import pytest

from runtime.launcher.pod.identity import inherited_environment
from runtime.launcher.variables import escape, expand, need_cold_start, references

VALUES = {"LR": "0.05", "OUT": "/out", "EMPTY": "", "LRX": "long"}


@pytest.mark.parametrize(
    ("argument", "names", "expanded"),
    [
        ("--lr=$LR", ["LR"], "--lr=0.05"),
        ("${LR}X$LRX", ["LR", "LRX"], "0.05Xlong"),
        ("$OUT/$OUT", ["OUT", "OUT"], "/out//out"),
        ("[$EMPTY]", ["EMPTY"], "[]"),
        ("$$LR $$$LR", ["LR"], "$LR $0.05"),
        ("$UNKNOWN ${UNKNOWN}", ["UNKNOWN", "UNKNOWN"], "$UNKNOWN ${UNKNOWN}"),
        ("^a$ $5 $(ls) `ls` a$", [], "^a$ $5 $(ls) `ls` a$"),
    ],
)
def test_references_are_found_and_expanded_without_a_shell(argument, names, expanded):
    assert references(argument) == names
    assert expand(argument, VALUES) == expanded
    assert expand(escape(argument), VALUES) == argument
    assert references(escape(argument)) == []


@pytest.mark.parametrize("argument", ["${", "${}", "${LR", "${LR:-1}", "${1}"])
def test_braces_need_a_name_and_an_end(argument):
    with pytest.raises(ValueError, match="braces"):
        references(argument)
    assert expand(argument, VALUES) == argument


def test_variables_that_are_read_at_an_import_need_a_cold_start():
    for name in ("OMP_NUM_THREADS", "LD_PRELOAD", "PYTHONHASHSEED", "TF_XLA_FLAGS", "TZ", "KERAS_BACKEND"):
        assert need_cold_start([name]), name
    # The last two only begin like TZ and LD_...
    assert not need_cold_start(["NCCL_DEBUG", "HOROVOD_LOG_LEVEL", "WANDB_API_KEY", "TZNAME", "LDAP"])


def test_ranks_in_a_pod_inherit_the_images_variables_and_nothing_of_the_cluster():
    given = {"OF_THE_IMAGE": "kept", "LANG": "C", "TRAINYARD_TOKEN": "secret", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    own = {"HOME": "/tmp", "USER": "trainyard", "LOGNAME": "trainyard", "PATH": os.defpath}
    assert inherited_environment(given) == {"OF_THE_IMAGE": "kept", "LANG": "C", **own}
