"""Files that git tracks are compared, and not changed."""

from benchmarks import tracked


def test_files_are_compared_and_left_alone(tmp_path, capsys):
    same, other, new = (tmp_path / name for name in ("same.md", "other.md", "new.md"))
    same.write_text("one\ntwo\n")
    other.write_text("one\ntwo\n")
    tracked.compare({same: "one\ntwo\n", other: "one\nthree\n", new: "four\n"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("same.md is as --write would write it")
    assert lines[1].endswith("other.md would change with --write:")
    assert [line for line in lines if line.startswith(("-t", "+t", "+f"))] == [
        "-two",
        "+three",
        "+four",
    ]
    assert not new.exists() and other.read_text() == "one\ntwo\n"
