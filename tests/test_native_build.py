"""Building the native library: once, safely, and with a clear word where it cannot be."""

import os
import shutil
import stat

import pytest

from moonvit.native import build, cpu, library
from moonvit.native.build import BuildError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOONVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "native"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A stand-in that writes a file and counts how often it was run."""
    program = tmp_path / "c++"

    def becomes(script):
        program.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        return program

    return becomes


def runs(tmp_path):
    path = tmp_path / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


WRITES = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'


def test_it_is_built_once(cache, compiler, tmp_path):
    compiler(WRITES)
    path = build.library()
    assert path.parent == cache
    assert path.read_text() == "made\n"
    assert build.library() == path
    assert runs(tmp_path) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert sorted(p.name for p in cache.iterdir()) == ["lock", path.name]


def test_another_compiler_builds_again_and_none_takes_what_is_there(cache, compiler, tmp_path, monkeypatch):
    compiler(WRITES)
    first = build.library()
    compiler(WRITES + " # newer")
    second = build.library()
    assert first != second
    assert runs(tmp_path) == 2
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    assert build.library() in (first, second)


def test_without_a_compiler(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    with pytest.raises(
        BuildError, match=r"CXX is '.*absent', which is not there \(install g\+\+, or set CXX\)"
    ):
        build.library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found \(install g\+\+, or set CXX\)"):
        build.library()
    assert not cache.exists()


def test_a_compiler_that_fails(cache, compiler):
    compiler("echo 'simd.h:3: error: no such thing' >&2; exit 1")
    with pytest.raises(BuildError, match="failed: simd.h:3: error: no such thing"):
        build.library()
    assert [p.name for p in cache.iterdir()] == ["lock"]
    compiler("exit 3")
    with pytest.raises(BuildError, match="failed: exit code 3"):
        build.library()


def test_a_compiler_command_that_cannot_be_read(cache, monkeypatch):
    monkeypatch.setenv("CXX", 'g++ "-O1')
    with pytest.raises(BuildError, match="CXX is .* no command: No closing quotation"):
        build.library()


def test_a_compiler_that_speaks_another_encoding(cache, compiler):
    compiler("printf 'error: \\344\\n' >&2; exit 1")
    with pytest.raises(BuildError, match="failed: error: \ufffd"):
        build.library()


@pytest.mark.parametrize("program", [WRITES, "exec g++ -shared -x c++ /dev/null -o "], ids=["text", "empty"])
def test_a_file_that_is_no_library(cache, compiler, monkeypatch, program):
    """Or one without the kernels: said, with what to do, and not raised."""
    if program != WRITES:
        if shutil.which("g++") is None:
            pytest.skip("g++ is not installed")
        program = f'while [ "$1" != -o ]; do shift; done; {program}"$2"'
    compiler(program)
    monkeypatch.setattr(cpu, "lacking", lambda: "")
    found = library._try()
    assert found.library is None
    assert "is not what was built there, delete it" in found.reason


@pytest.mark.skipif(os.name != "posix", reason="permissions are of POSIX systems")
def test_a_place_where_others_may_write(cache, compiler):
    compiler(WRITES)
    path = build.library()
    cache.chmod(0o777)
    with pytest.raises(BuildError, match="others may write there"):
        build.library()
    cache.chmod(0o700)
    path.chmod(0o666)
    with pytest.raises(BuildError, match="others may write there"):
        build.library()


def test_the_sources_are_in_the_package():
    for name in (*build.SOURCES, *build.HEADERS):
        assert (build.HERE / name).is_file()


def test_the_real_compiler_is_content(cache):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    if cpu.cpu_flags() == frozenset():
        pytest.skip("not an x86 processor")
    path = build.library()
    assert path.stat().st_size > 10_000
