import pytest

from console.operations import context


@pytest.mark.parametrize("offered", ["3f2a91c0d1e2", "req:0123-4567.89_a", "a" * 64])
def test_a_sane_id_of_a_proxy_is_kept(offered):
    assert context.request_id(offered) == offered


@pytest.mark.parametrize(
    "offered", ["", "short", "a" * 65, "with space", 'quo"te12345', "line\nbreak123", "-leading-dash"]
)
def test_any_other_is_replaced(offered):
    made = context.request_id(offered)
    assert made != offered
    assert context.SANE_ID.fullmatch(made)
    assert context.request_id(offered) != made


def test_fields_are_those_of_the_blocks_around():
    with context.bound(request_id="request-1", user=None) as outer:
        with context.bound(job=7, run="job-7-1"):
            assert context.fields() == {"request_id": "request-1", "job": 7, "run": "job-7-1"}
            context.add(cluster="default")
        context.add(user=3)
        assert context.fields() == {"request_id": "request-1", "user": 3}
    assert context.fields() == {}
    assert outer["user"] == 3
    context.add(user=4)
    assert context.fields() == {}


def test_a_function_is_about_what_its_arguments_say():
    @context.about(lambda number, **_: {"job": number})
    def look(number, *, deep=False):
        return deep, context.fields()

    assert look(4, deep=True) == (True, {"job": 4})
    assert context.fields() == {}


def test_only_the_request_goes_along_and_only_what_is_sane_is_taken():
    with context.bound(request_id="request-1", user=3, job=7):
        assert context.carried() == {"request_id": "request-1", "user": 3}
    forged = {"request_id": 'x"\n{}', "user": 3, "organization": ["a"], "job": 9}
    assert context.received(forged) == {"user": 3}
    assert context.received("nonsense") == {}
