"""What the builder of images passes on: the settings of pip to uv, and the programs of the PATH to compilers."""

from pathlib import Path

from runtime.images import uv, wheels

CONFIGURATION = """\
:env:.find-links='/wheels /more'
global.cert='/etc/certificate.pem'
global.extra-index-url='https://one.example https://two.example'
global.find-links='/old'
install.index-url='https://index.example/simple'
"""
"""What `pip config list` prints."""


def test_uv_gets_pips_settings_except_those_that_the_environment_has_for_uv(monkeypatch):
    for name in ("UV_FIND_LINKS", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_STRATEGY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_INDEX", "https://mine.example")  # counts instead of the two extra indexes
    assert uv.environment(CONFIGURATION) == {
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "SSL_CERT_FILE": "/etc/certificate.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip does, which takes the best version of all indexes
    }


def test_a_compiler_sees_the_programs_of_the_path_but_no_compiler_of_cuda(tmp_path, monkeypatch):
    """A folder of the PATH that has `nvcc` is replaced by one with links to its other programs."""
    plain, mixed = tmp_path / "plain", tmp_path / "mixed"
    for place, names in ((plain, ["cc"]), (mixed, ["nvcc", "nvcc.profile", "make"])):
        place.mkdir()
        for name in names:
            (place / name).touch()
    monkeypatch.setenv("PATH", f"{plain}:{mixed}")
    first, second = wheels._path_without_cuda(tmp_path)
    assert first == str(plain)
    assert [path.name for path in Path(second).iterdir()] == ["make"]
