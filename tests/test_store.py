"""The store's promises, one class run over files, memory and a real S3 server."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import secrets
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem
from s3fs.errors import translate_boto_error

from eagle3 import store as stores
from eagle3.errors import (
    ConfigError,
    Eagle3Error,
    EnvironmentMisconfigured,
    PermissionRefused,
    ServiceUnavailable,
    TemporaryFailure,
)
from eagle3.store import ObjectInfo, Store, open_store, sha256_of_file
from eagle3.store import local as local_files
from tests.s3_server import BUCKET

# The least that S3 allows, so that two parts are no hundred megabytes.
PART = 5 * 2**20
SEVERAL_PARTS = 2 * PART + 2**20


class StoreContract:
    """What every backend must hold. A subclass gives the fixture `url`, an unused prefix."""

    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url)

    def test_what_is_written_is_read(self, store):
        store.write_bytes("a/b.bin", b"one")
        assert store.read_bytes("a/b.bin") == b"one"
        assert store.size("a/b.bin") == 3
        assert store.exists("a/b.bin")

    def test_a_write_replaces(self, store):
        store.write_bytes("a", b"longer than the next")
        store.write_bytes("a", b"short")
        assert store.read_bytes("a") == b"short"

    def test_an_empty_object_is_an_object(self, store):
        store.create_bytes("empty", b"")
        assert store.read_bytes("empty") == b""
        assert store.list() == [ObjectInfo(path="empty", bytes=0)]

    def test_a_range_is_that_part_of_the_object(self, store):
        store.write_bytes("a", bytes(range(10)))
        assert store.read_range("a", 3, 6) == bytes([3, 4, 5])
        assert store.read_range("a", 0, 10) == bytes(range(10))

    def test_a_range_past_the_end_is_what_is_there(self, store):
        store.write_bytes("a", bytes(range(10)))
        assert store.read_range("a", 8, 20) == bytes([8, 9])
        assert store.read_range("a", 10, 20) == b""
        assert store.read_range("a", 15, 20) == b""

    @pytest.mark.parametrize("read", ["read_bytes", "size", "sha256"])
    def test_what_is_not_there_is_not_found(self, store, read):
        with pytest.raises(FileNotFoundError):
            getattr(store, read)("nothing")

    def test_a_range_of_nothing_is_not_found(self, store):
        with pytest.raises(FileNotFoundError):
            store.read_range("nothing", 0, 4)

    def test_a_prefix_is_no_object(self, store):
        store.write_bytes("a/b", b"1")
        assert not store.exists("a")
        with pytest.raises(FileNotFoundError):
            store.size("a")

    def test_a_created_object_is_never_replaced(self, store):
        store.create_bytes("a", b"first")
        with pytest.raises(FileExistsError):
            store.create_bytes("a", b"second")
        assert store.read_bytes("a") == b"first"

    def test_creating_the_same_bytes_again_is_a_retry_that_worked(self, store, tmp_path):
        store.create_bytes("a", b"first")
        store.create_bytes("a", b"first")
        source = tmp_path / "source"
        source.write_bytes(b"first")
        store.create_file(source, "a")
        assert [info.path for info in store.list()] == ["a"]
        assert store.read_bytes("a") == b"first"

    @pytest.mark.fault("B35")
    def test_what_vanishes_as_it_is_found_taken_is_taken_and_no_missing_bucket(
        self, store, monkeypatch
    ):
        store.write_bytes("a", b"1")
        plain = Store.read_bytes

        def gone(one: Store, path: str) -> bytes:
            one.delete(path)
            return plain(one, path)

        monkeypatch.setattr(Store, "read_bytes", gone)
        with pytest.raises(FileExistsError):
            store.create_bytes("a", b"2")
        store.create_bytes("a", b"2")

    def test_of_many_writers_one_wins(self, store):
        def write(number: int) -> bool:
            try:
                store.create_bytes("claim", b"%d" % number)
            except FileExistsError:
                return False
            return True

        store.write_bytes("warm", b"")
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(write, range(8)))
        assert won.count(True) == 1
        assert store.read_bytes("claim") == b"%d" % won.index(True)

    def test_a_file_goes_up_and_comes_down_whole(self, store, tmp_path):
        source, target = tmp_path / "source", tmp_path / "deep" / "target"
        source.write_bytes(secrets.token_bytes(100_000))
        store.create_file(source, "a/file")
        store.get_file("a/file", target)
        assert target.read_bytes() == source.read_bytes()
        assert store.sha256("a/file") == sha256_of_file(source)
        assert [path.name for path in target.parent.iterdir()] == ["target"]

    def test_a_created_file_is_never_replaced_and_a_put_one_is(self, store, tmp_path):
        source = tmp_path / "source"
        source.write_bytes(b"first")
        store.create_file(source, "a")
        source.write_bytes(b"other")
        with pytest.raises(FileExistsError):
            store.create_file(source, "a")
        assert store.read_bytes("a") == b"first"
        store.put_file(source, "a")
        assert store.read_bytes("a") == b"other"

    def test_a_file_that_is_not_there_leaves_nothing_on_the_disk(self, store, tmp_path):
        with pytest.raises(FileNotFoundError):
            store.get_file("nothing", tmp_path / "target")
        assert list(tmp_path.glob("**/target*")) == []

    def test_a_listing_is_by_path_and_relative_to_the_store(self, store):
        for path in ("b/2", "b/10", "a", "b/c/d"):
            store.write_bytes(path, path.encode())
        assert [info.path for info in store.list()] == ["a", "b/10", "b/2", "b/c/d"]
        assert store.list("b")[0] == ObjectInfo(path="b/10", bytes=4)
        assert [info.path for info in store.child("b").list()] == ["10", "2", "c/d"]

    def test_a_listing_of_nothing_is_empty(self, store):
        assert store.list() == []
        assert store.list("nothing/here") == []

    def test_a_listing_keeps_to_its_prefix(self, store):
        store.write_bytes("units/1", b"")
        store.write_bytes("units-old/1", b"")
        assert [info.path for info in store.list("units")] == ["units/1"]
        assert [info.path for info in store.child("units").list()] == ["1"]

    @pytest.mark.fault("B32")
    def test_another_client_s_writes_are_seen_at_once(self, store, url):
        assert store.list() == []
        assert not store.exists("a/late")
        open_store(url).write_bytes("a/late", b"1")
        assert store.exists("a/late")
        assert [info.path for info in store.list()] == ["a/late"]
        open_store(url).delete("a/late")
        assert store.list() == []

    def test_deleting_is_done_when_nothing_is_there(self, store):
        store.write_bytes("a", b"1")
        store.delete("a")
        store.delete("a")
        assert not store.exists("a")

    def test_the_folders_of_a_level_are_named_and_nothing_deeper_is(self, store):
        for path in ("b/2/deep", "a/1", "c", "b-old/3"):
            store.write_bytes(path, b"1")
        assert store.folders() == ("a", "b", "b-old")
        assert store.folders("b") == store.child("b").folders() == ("2",)
        assert store.folders("nothing") == ()

    def test_tidying_takes_no_object(self, store):
        store.write_bytes("a/b/c", b"1")
        store.tidy()
        assert [info.path for info in store.list()] == ["a/b/c"]

    def test_the_hash_is_that_of_the_bytes(self, store, monkeypatch):
        monkeypatch.setattr("eagle3.store._HASH_CHUNK", 1000)
        data = secrets.token_bytes(2500)
        store.write_bytes("a", data)
        assert store.sha256("a") == hashlib.sha256(data).hexdigest()

    def test_a_probe_passes_and_leaves_nothing(self, store):
        store.probe()
        assert store.list() == []

    @pytest.mark.parametrize("path", ["../other", "/etc/passwd", "a/../../b"])
    def test_a_path_that_leaves_the_prefix_is_refused(self, store, path):
        with pytest.raises(ConfigError):
            store.write_bytes(path, b"1")

    def test_names_with_odd_characters_survive(self, store):
        names = ["with space", "percent%20", "plus+", "ümlaut", "a=b,c"]
        for name in names:
            store.write_bytes(name, name.encode())
        assert sorted(info.path for info in store.list()) == sorted(names)
        assert [store.read_bytes(name) for name in names] == [name.encode() for name in names]

    def test_a_store_travels_by_pickle_and_by_url(self, store):
        store.child("x").write_bytes("a", b"1")
        copy = pickle.loads(pickle.dumps(store.child("x")))
        assert copy.url == store.child("x").url
        assert copy.read_bytes("a") == b"1"
        assert open_store(copy.url).read_bytes("a") == b"1"


class SharedStoreContract(StoreContract):
    """And what a store that other processes can reach must hold as well."""

    def test_a_spawned_process_opens_its_own_client(self, store):
        store.write_bytes("a", b"1")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(store.read_bytes, ("a",)) == b"1"

    @pytest.mark.fault("B36")
    def test_a_forked_process_opens_its_own_client(self, store):
        store.write_bytes("a", b"1")
        process = os.fork()
        if process == 0:
            os._exit(0 if store.read_bytes("a") == b"1" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

    @pytest.mark.fault("B35")
    def test_of_many_processes_one_wins(self, store, url):
        code = textwrap.dedent("""
            import sys
            from eagle3.store import open_store
            store = open_store(sys.argv[1])
            store.exists("start")
            print("ready", flush=True)
            sys.stdin.readline()
            try:
                store.create_bytes("claim", sys.argv[2].encode())
            except FileExistsError:
                sys.exit(3)
        """)
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", code, url, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for number in range(3)
        ]
        for writer in writers:
            writer.stdout.readline()
        for writer in writers:
            writer.stdin.write(b"\n")
            writer.stdin.flush()
        for writer in writers:
            writer.communicate(timeout=60)
        assert sorted(writer.returncode for writer in writers) == [0, 3, 3]
        won = [writer.returncode for writer in writers].index(0)
        assert store.read_bytes("claim") == b"%d" % won

    @pytest.mark.fault("B28")
    def test_a_writer_killed_on_the_way_leaves_no_object(self, store, url, tmp_path):
        source = tmp_path / "big"
        source.write_bytes(bytes(SEVERAL_PARTS))
        code = textwrap.dedent("""
            import os, sys, threading
            from pathlib import Path
            from eagle3 import store as stores
            stores._PART_BYTES = int(sys.argv[4])
            store = stores.open_store(sys.argv[1])
            store.exists("warm")
            threading.Timer(float(sys.argv[3]), os._exit, (9,)).start()
            store.create_file(Path(sys.argv[2]), "big")
            os._exit(0)
        """)
        for delay in ("0.01", "0.05"):
            command = [sys.executable, "-c", code, url, str(source), delay, str(PART)]
            ended = subprocess.run(command, timeout=60, check=False).returncode
            sizes = [info.bytes for info in store.list()]
            # Killed after its last step it has left a whole one.
            assert sizes == [SEVERAL_PARTS] or (sizes == [] and ended), f"after {delay} s"
            store.delete("big")


class TestFile(SharedStoreContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path / 'run'}"

    def test_a_path_is_a_url_too(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        open_store("runs/demo").write_bytes("a", b"1")
        assert (tmp_path / "runs" / "demo" / "a").read_bytes() == b"1"
        assert open_store("runs/demo").url == f"file://{tmp_path}/runs/demo"
        assert open_store("runs/demo").local_path("a") == tmp_path / "runs" / "demo" / "a"

    def test_what_a_killed_writer_left_is_in_no_listing(self, store):
        folder = store.local_path()
        folder.mkdir(parents=True)
        (folder / f"{local_files._PARTIAL}0123").write_bytes(b"half")
        assert store.list() == []

    def test_tidying_takes_what_killed_writers_left_and_the_empty_folders(self, store):
        store.write_bytes("a/b", b"1")
        folder = store.local_path()
        (folder / "c").mkdir()
        left = folder / "c" / f"{local_files._PARTIAL}0123"
        left.write_bytes(b"half")
        long_ago = time.time() - local_files._ABANDONED_SECONDS - 1
        os.utime(left, (long_ago, long_ago))
        store.tidy()
        assert [path.name for path in folder.iterdir()] == ["a"]

    def test_tidying_takes_nothing_from_a_living_writer(self, store, monkeypatch):
        """Another process deletes beside it, between its last byte and the name."""
        fsync = os.fsync

        def tidied(handle: int) -> None:
            fsync(handle)
            store.tidy()

        monkeypatch.setattr(os, "fsync", tidied)
        store.create_bytes("a/b", b"1")
        assert store.read_bytes("a/b") == b"1"

    @pytest.mark.fault("B28")
    def test_a_writer_that_fails_leaves_nothing_behind(self, store, monkeypatch):
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(TemporaryFailure, match="free space"):
            store.write_bytes("a", b"1")
        assert list(store.local_path().iterdir()) == []

    def test_tidying_takes_no_folder_from_under_a_writer(self, store):
        done = threading.Event()

        def tidy():
            while not done.wait(0.0005):
                store.tidy()

        other = threading.Thread(target=tidy)
        other.start()
        try:
            for number in range(300):
                store.create_bytes(f"a/b/{number}", b"1")
                store.delete(f"a/b/{number}")
        finally:
            done.set()
            other.join()

    def test_a_prefix_below_a_file_is_the_user_s_mistake(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError) as caught:
            open_store(f"file://{tmp_path}/file/run").probe()
        assert caught.value.exit_code == 64

    @pytest.mark.fault("B28")
    def test_a_reader_sees_the_old_object_or_the_new_one(self, store):
        old, new = bytes(2**20), b"\1" * 2**20
        store.write_bytes("a", old)
        done = threading.Event()

        def write() -> None:
            for _ in range(20):
                store.write_bytes("a", new)
                store.write_bytes("a", old)
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not done.is_set():
            assert store.read_bytes("a") in (old, new)
        writer.join()


class TestMemory(StoreContract):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://{secrets.token_hex(4)}/run"


@pytest.mark.slow
class TestS3(SharedStoreContract):
    @pytest.fixture
    def url(self, s3_environment) -> str:
        return f"s3://{BUCKET}/{secrets.token_hex(4)}/run"

    @pytest.fixture
    def calls(self, monkeypatch) -> list[str]:
        """What is asked of S3, with parts of the least size."""
        seen: list[str] = []
        whole = S3FileSystem._call_s3

        async def noted(self, method, *args, **kwargs):
            seen.append(method)
            return await whole(self, method, *args, **kwargs)

        monkeypatch.setattr(S3FileSystem, "_call_s3", noted)
        monkeypatch.setattr(stores, "_PART_BYTES", PART)
        return seen

    @pytest.mark.parametrize(
        "splits", [[], ["b"], ["a-03", "a-07"], ["0", "a-02", "a-02x", "sub/c", "z"]]
    )
    def test_a_listing_in_parts_is_the_listing(self, store, splits):
        names = [*(f"a-{number:02}" for number in range(9)), "sub/a", "sub/c", "sub/c-"]
        for number, name in enumerate(names):
            store.write_bytes(name, b"1" * number)
        whole = [ObjectInfo(path=name, bytes=size) for size, name in enumerate(names)]
        assert store.list(splits=splits) == whole
        assert store.list("sub") == whole[-3:]
        theirs = S3FileSystem(use_listings_cache=False).find(store.url, detail=True)
        assert sorted(info["size"] for info in theirs.values()) == [info.bytes for info in whole]

    @pytest.mark.parametrize("of", ["file", "bytes"])
    def test_an_object_of_several_parts_is_never_replaced(self, store, tmp_path, calls, of):
        source, data = tmp_path / "big", secrets.token_bytes(SEVERAL_PARTS)

        def create(data: bytes) -> None:
            source.write_bytes(data)
            store.create_file(source, "big") if of == "file" else store.create_bytes("big", data)

        create(data)
        assert calls.count("upload_part") == 3
        assert "complete_multipart_upload" in calls
        assert "put_object" not in calls
        create(data)
        with pytest.raises(FileExistsError):
            create(b"other" + data[5:])
        assert store.sha256("big") == hashlib.sha256(data).hexdigest()

    def test_an_upload_whose_last_answer_was_lost_is_done(self, store, tmp_path, monkeypatch):
        monkeypatch.setattr(stores, "_PART_BYTES", PART)
        whole = S3FileSystem._call_s3

        async def lost(self, method, *args, **kwargs):
            done = await whole(self, method, *args, **kwargs)
            if method == "complete_multipart_upload":
                answer = {"Error": {"Code": "NoSuchUpload", "Message": "it does not exist"}}
                raise translate_boto_error(ClientError(answer, method))
            return done

        monkeypatch.setattr(S3FileSystem, "_call_s3", lost)
        source, data = tmp_path / "big", secrets.token_bytes(SEVERAL_PARTS)
        source.write_bytes(data)
        store.create_file(source, "file")
        store.create_bytes("bytes", data)
        assert store.sha256("file") == store.sha256("bytes") == sha256_of_file(source)

    @pytest.mark.fault("B31", "B113")
    def test_a_connection_that_breaks_gives_the_upload_up(self, store, monkeypatch):
        seen: list[str] = []
        whole = S3FileSystem._call_s3

        async def broken(self, method, *args, **kwargs):
            seen.append(method)
            if method == "upload_part":
                raise EndpointConnectionError(endpoint_url="https://s3.example")
            return await whole(self, method, *args, **kwargs)

        monkeypatch.setattr(S3FileSystem, "call_s3", sync_wrapper(broken))
        with pytest.raises(ServiceUnavailable):
            store.probe()
        assert seen[-1] == "abort_multipart_upload"

    def test_a_server_that_knows_no_condition_for_parts_is_refused(self, store, monkeypatch):
        whole = S3FileSystem._call_s3

        async def forgetful(self, method, *args, **kwargs):
            if method == "complete_multipart_upload":
                kwargs.pop("IfNoneMatch")
            return await whole(self, method, *args, **kwargs)

        monkeypatch.setattr(S3FileSystem, "call_s3", sync_wrapper(forgetful))
        with pytest.raises(EnvironmentMisconfigured, match="an object of several parts"):
            store.probe()
        assert store.list() == []

    @pytest.mark.fault("B34")
    def test_a_wrong_secret_is_refused(self, url, monkeypatch):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "0" * 40)
        self.refuses(url, PermissionRefused, 77)

    def test_an_unknown_key_is_refused(self, url, monkeypatch):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        self.refuses(url, PermissionRefused, 77)

    def test_missing_credentials_may_still_come(self, url, monkeypatch, tmp_path):
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("HOME", str(tmp_path))
        self.refuses(url, TemporaryFailure, 75)

    def test_a_server_that_is_away_can_be_tried_again(self, url, monkeypatch):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setattr("eagle3.store.urls._RETRIES", 1)
        self.refuses(url, ServiceUnavailable, 69)

    def test_an_endpoint_that_is_no_url_names_the_variable(self, url, monkeypatch):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
        assert "AWS_ENDPOINT_URL" in str(self.refuses(url, EnvironmentMisconfigured, 78))

    def test_a_bucket_that_is_not_there_is_the_user_s_mistake(self, s3_environment):
        error = self.refuses("s3://no-such-bucket/run", ConfigError, 64)
        assert "bucket" in error.remedy

    def refuses(self, url: str, kind: type[Eagle3Error], code: int) -> Eagle3Error:
        with pytest.raises(kind) as caught:
            open_store(url).probe()
        assert caught.value.exit_code == code
        assert "\n" not in str(caught.value)
        return caught.value
