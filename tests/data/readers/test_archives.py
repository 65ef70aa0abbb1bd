from __future__ import annotations

import struct
import tarfile

import pytest
from packed import tar_of, zip_of

from cyberslm.data.readers import archives
from cyberslm.errors import DataError

MIXED = {
    "in/a.txt": b"one",
    "in/.b.txt": b"hidden",
    ".git/c.txt": b"hidden",
    "d.png": b"picture",
    "inner.zip": b"nested",
    "lie.txt": zip_of({"x.txt": b"nested"}),
    "empty.txt": b"",
    "../up.txt": b"two",
}


@pytest.mark.parametrize(("name", "pack"), [("a.tar", tar_of), ("a.zip", zip_of)])
def test_an_archive_is_read_like_a_folder_and_what_is_not_read_is_counted(read, name, pack):
    found = read(name, pack(MIXED))
    assert found.texts == ["one"]
    assert found.names == [f"{name}!in/a.txt"]
    assert found.counts.skipped == {
        "hidden": 3,
        "extension .png": 1,
        "archive in an archive": 2,
        "empty": 1,
    }
    assert found.counts.first["extension .png"].endswith(f"{name}!d.png")


def test_links_and_devices_in_a_tar_file_are_counted_not_followed(read):
    def change(info: tarfile.TarInfo) -> None:
        info.type = {"l.txt": tarfile.SYMTYPE, "h.txt": tarfile.LNKTYPE, "f.txt": tarfile.FIFOTYPE}.get(
            info.name, tarfile.REGTYPE
        )
        info.linkname = "/etc/passwd"

    found = read("a.tar", tar_of({"a.txt": b"text", "l.txt": b"", "h.txt": b"", "f.txt": b""}, change))
    assert (found.texts, found.counts.skipped) == (["text"], {"not a regular file": 3})


def test_names_of_members_are_printable_and_of_bounded_length(read):
    names = ["evil\x1b[31m\n.txt", "bidi\u202e.txt", "x" * 3000 + ".txt"]
    found = read("a.tar", tar_of({name: b"text" for name in names}))
    assert found.names[:2] == ["a.tar!evil\\x1b[31m\\n.txt", "a.tar!bidi\\u202e.txt"]
    assert len(found.names[2]) < 1100
    assert all(name.isprintable() for name in found.names)


@pytest.mark.parametrize("keep", [700, 1024, 1030, 2000])
def test_a_tar_file_cut_at_any_place_is_told(read, keep):
    """The library takes a cut between members, or a damaged header, for the end of the archive."""
    data = tar_of({"a.txt": b"one", "b.txt": b"two"})
    with pytest.raises(DataError, match=r"a\.tar.*on_bad_input: skip"):
        read("a.tar", data[:keep])
    assert read("a.tar", data[:keep], on_bad_input="skip").texts in (["one"], ["one", "two"])


def test_a_damaged_header_within_a_tar_file_is_told(read):
    data = bytearray(tar_of({"a.txt": b"one", "b.txt": b"two"}))
    data[1030] ^= 1
    with pytest.raises(DataError, match=r"a\.tar: a tar file that is damaged"):
        read("a.tar", bytes(data))


def test_the_checksum_behind_a_compressed_tar_file_counts(read, compress):
    data = bytearray(compress[".gz"](tar_of({"a.txt": b"one"})))
    data[-6] ^= 1
    with pytest.raises(DataError, match=r"a\.tgz: the gzip data are damaged"):
        read("a.tgz", bytes(data))


def test_sizes_that_a_tar_header_claims_are_not_believed(read):
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, 1 << 33
    with pytest.raises(DataError, match=r"damaged tar file|tar header of 8,589,934,592 bytes"):
        read("a.tar", info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))


def test_a_zip_directory_that_claims_to_be_huge_is_refused(read):
    data = bytearray(zip_of({"a.txt": b"text"}))
    data[-10:-6] = struct.pack("<L", 1 << 31)
    with pytest.raises(DataError, match=r"a zip directory of 2,147,483,648 bytes; the largest that is read has"):
        read("a.zip", bytes(data))


def test_a_tar_file_of_too_many_members_is_read_up_to_the_limit(read, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    data = tar_of({f"{number}.txt": b"text" for number in range(5)})
    found = read("a.tar", data, on_bad_input="skip")
    assert (len(found.texts), found.counts.skipped) == (3, {"damaged or cut short": 1})


def test_an_encrypted_member_is_named_and_the_others_are_read(read):
    data = bytearray(zip_of({"a.txt": b"secret", "b.txt": b"open"}))
    data[6] |= 1
    data[data.index(b"PK\1\2") + 8] |= 1
    with pytest.raises(DataError, match=r"a\.zip!a\.txt: encrypted"):
        read("a.zip", bytes(data))
    found = read("a.zip", bytes(data), on_bad_input="skip")
    assert (found.texts, found.counts.skipped) == (["open"], {"encrypted": 1})


@pytest.mark.parametrize("at", [14, 45])
def test_a_damaged_member_costs_itself_alone(read, at):
    data = bytearray(zip_of({"a.txt": b"text of one\n" * 40, "b.txt": b"two"}))
    data[data.index(b"PK\1\2") + 16 if at == 14 else at] ^= 0x41
    with pytest.raises(DataError, match=r"a\.zip!a\.txt.*damaged"):
        read("a.zip", bytes(data))
    found = read("a.zip", bytes(data), on_bad_input="skip")
    assert (found.texts, found.counts.skipped) == (["two"], {"damaged or cut short": 1})


@pytest.mark.parametrize("keep", [10, 60, -30])
def test_a_zip_file_that_is_cut_is_told(read, keep):
    with pytest.raises(DataError, match=r"a\.zip: a zip file that is cut short"):
        read("a.zip", zip_of({"a.txt": b"text", "b.txt": b"text"})[:keep])


def test_archives_are_not_written_to_disk(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert read("a.zip", zip_of({"a.txt": b"text"})).texts == ["text"]
    assert read("a.tar", tar_of({"a.txt": b"text"})).texts == ["text"]
    assert list(tmp_path.iterdir()) == []
