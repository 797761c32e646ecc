"""The Kubernetes cluster that a run's Jobs live in: few requests, plain values, errors of ours.

Objects come and go as the JSON that the API server speaks, so that what the chart rendered is
what is created, field for field. Nothing is watched and nothing is cached: whoever asks again
later asks anew, and so misses no event.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from eagle3.cluster.refusals import (
    first_line,
    gone,
    message_of,
    no_answer,
    refusal,
    thing_at,
)
from eagle3.errors import (
    ConfigError,
    EnvironmentMisconfigured,
    TemporaryFailure,
    UpstreamMissing,
)

Object = dict[str, Any]
"""An object of the API as JSON has it."""

ANNOTATIONS = "eagle3"
# On a runner's Job that a person has cancelled, which must then order nothing.
CANCELLED = f"{ANNOTATIONS}/cancelled"
RUN_LABEL = f"{ANNOTATIONS}/run"
STAGE_LABEL = f"{ANNOTATIONS}/stage"
RELEASE_LABEL = "app.kubernetes.io/instance"

_JOBS = "/apis/batch/v1/namespaces/{namespace}/jobs"
_CORE = "/api/v1/namespaces/{namespace}"
_CONFIG_MAPS = f"{_CORE}/configmaps"
# An unknown field is an error, and not a warning that nobody reads.
_STRICT = (("fieldValidation", "Strict"),)
# Seconds to connect, and to wait for an answer.
_TIMEOUT = (5, 30)
# What the client raises, as it comes, of a file that holds something else.
_NO_KUBECONFIG = (yaml.YAMLError, TypeError, ValueError, LookupError, AttributeError)
_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Cluster:
    """One namespace of one cluster.

    Every method raises ServiceUnavailable where the API server does not answer,
    PermissionRefused where it refuses these credentials, and TemporaryFailure for a full quota.
    """

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self.api = api

    def job(self, name: str) -> Object | None:
        """A Job, or None where there is none of that name."""
        return self._read(f"{_JOBS}/{name}")

    def jobs(self, selector: str) -> list[Object]:
        """The Jobs that a label selector finds, by name."""
        return self._list(_JOBS, selector)

    def pods(self, job: str) -> list[Object]:
        """The pods of a Job, by name."""
        return self._list(f"{_CORE}/pods", f"batch.kubernetes.io/job-name={job}")

    def log(
        self, pod: str, container: str, *, follow: bool = False, since: str = ""
    ) -> Iterator[str]:
        """The lines that a container wrote, each after its moment and a blank.

        Args:
            follow: until the container ends or the connection breaks, as they are written.
            since: a moment as it stands before a line; what was written earlier is left out.

        Raises UpstreamMissing where the pod is gone.
        """
        query = [("container", container), ("timestamps", "true")]
        query += [("follow", "true")] * follow + [("sinceTime", since)] * bool(since)
        # Nobody knows when the next line comes.
        patience = (_TIMEOUT[0], None) if follow else _TIMEOUT
        path = f"{_CORE}/pods/{pod}/log"
        try:
            answer = self._answer("GET", path, query=query, accept="*/*", timeout=patience)
            with contextlib.closing(answer.response):
                for line in answer.response:
                    yield line.decode(errors="replace").rstrip("\n")
        except FileNotFoundError as error:
            raise gone(path, self.namespace) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise no_answer(thing_at(path), error) from error

    def warnings(self) -> list[Object]:
        """The namespace's events of the type Warning, by name."""
        return self._list(f"{_CORE}/events", fields="type=Warning")

    def config_map(self, name: str) -> Object | None:
        """A ConfigMap, or None where there is none of that name."""
        return self._read(f"{_CONFIG_MAPS}/{name}")

    def create_job(self, body: Object) -> Object:
        """Create a Job and return it; where one of that name stands already, that one.

        Raises ConfigError where the API server finds a field wrong or unknown, or
        the namespace is not there.
        """
        name = body["metadata"]["name"]
        try:
            return self._call("POST", _JOBS, body=body, query=_STRICT)
        except FileExistsError:
            standing = self.job(name)
        except FileNotFoundError as error:
            raise ConfigError(
                "namespace",
                wanted="one that is there",
                found=self.namespace,
                remedy="create it, or name another",
            ) from error
        if standing is None:
            raise TemporaryFailure(
                f"job {name}",
                wanted="the one that stood there",
                found="none any more",
                remedy="run it again",
            )
        return standing

    def patch_job(self, name: str, change: Object) -> Object:
        """Merge a change into a Job and return it. Raises UpstreamMissing where there is none."""
        return self._patch(f"{_JOBS}/{name}", change)

    def patch_config_map(self, name: str, change: Object) -> Object:
        """Merge a change into a ConfigMap. Raises UpstreamMissing where there is none."""
        return self._patch(f"{_CONFIG_MAPS}/{name}", change)

    def annotate(self, job: Object, notes: Mapping[str, str]) -> None:
        """Write annotations of ours on a Job, if they say anything new and it is still there."""
        wanted = {f"{ANNOTATIONS}/{key}": value for key, value in notes.items()}
        standing = job["metadata"].get("annotations", {})
        if any(standing.get(key, "") != value for key, value in wanted.items()):
            with contextlib.suppress(UpstreamMissing):
                self.patch_job(job["metadata"]["name"], {"metadata": {"annotations": wanted}})

    def delete_job(self, job: Object, *, foreground: bool = False) -> None:
        """Delete exactly this Job and its pods; one that is gone already is no error.

        Another Job that has taken its name is left alone.

        Args:
            foreground: keep the Job until its pods have ended.
        """
        metadata, policy = job["metadata"], "Foreground" if foreground else "Background"
        body = {"propagationPolicy": policy, "preconditions": {"uid": metadata["uid"]}}
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            self._call("DELETE", f"{_JOBS}/{metadata['name']}", body=body)

    def wait_until_gone(self, job: Object, seconds: float = 120.0) -> None:
        """Wait until a deleted Job's name is free. Raises TemporaryFailure when it takes longer."""
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        deadline = time.monotonic() + seconds
        while (standing := self.job(name)) and standing["metadata"]["uid"] == uid:
            if time.monotonic() > deadline:
                raise TemporaryFailure(
                    f"job {name}",
                    wanted=f"it gone within {seconds:.0f} s",
                    found="it, being deleted",
                    remedy="see its finalizers, and try again",
                )
            time.sleep(0.5)

    def tell(self, about: Object, reason: str, message: str, *, warning: bool = False) -> None:
        """Create an Event about a Job; the same one twice is one.

        Args:
            about: the Job, with its metadata.
            reason: one word in CamelCase, as kubectl shows it.
        """
        metadata = about["metadata"]
        told = hashlib.sha256(f"{metadata['uid']} {reason} {message}".encode()).hexdigest()[:16]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "metadata": {"name": f"{metadata['name'][:40].rstrip('-.')}.{told}"},
            "involvedObject": {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "name": metadata["name"],
                "namespace": self.namespace,
                "uid": metadata["uid"],
            },
            "reason": reason,
            "message": message[:1000],
            "type": "Warning" if warning else "Normal",
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": "eagle3"},
        }
        with contextlib.suppress(FileExistsError):
            self._call("POST", f"{_CORE}/events", body=body)

    def _read(self, path: str) -> Object | None:
        try:
            return self._call("GET", path)
        except FileNotFoundError:
            return None

    def _list(self, path: str, selector: str = "", fields: str = "") -> list[Object]:
        query = [("labelSelector", selector), ("fieldSelector", fields)]
        found = self._call("GET", path, query=query)["items"]
        return sorted(found, key=lambda item: str(item["metadata"]["name"]))

    def _patch(self, path: str, change: Object) -> Object:
        try:
            return self._call("PATCH", path, body=change, kind="application/merge-patch+json")
        except FileNotFoundError as error:
            raise gone(path, self.namespace) from error
        except FileExistsError as error:
            raise TemporaryFailure(
                thing_at(path),
                wanted="it to stay as it is for a moment",
                found="409, it was changed meanwhile",
                remedy="try again",
            ) from error

    def _call(self, method: str, path: str, **arguments: Any) -> Object:
        """The answer to one request, which `_answer` makes, read to its end."""
        found: Object = json.loads(self._answer(method, path, **arguments).data)
        return found

    def _answer(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: Sequence[tuple[str, str]] = (),
        kind: str = "application/json",
        accept: str = "application/json",
        timeout: tuple[float, float | None] | None = None,
    ) -> Any:
        """One request. The client's own methods would turn bodies into its model of the API.

        With a timeout of its own a good answer is left to be read. Raises FileNotFoundError for a
        404 and FileExistsError for a 409.
        """
        where = thing_at(path)
        request = self.api.param_serialize(
            method,
            path.format(namespace=self.namespace),
            query_params=list(query),
            header_params={"Accept": accept, "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self.api.call_api(*request, _request_timeout=timeout or _TIMEOUT)
            if not ((good := 200 <= response.status < 300) and timeout):
                response.read()
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            raise no_answer(where, error) from error
        if not good:
            raise refusal(where, response.status, message_of(response.data or b"", response.reason))
        return response


def open_cluster(namespace: str | None = None, context: str | None = None) -> Cluster:
    """The cluster of this pod's service account, or of the kubeconfig on a laptop.

    Args:
        namespace: by default the pod's own, or the context's.
        context: of the kubeconfig; the current one by default.

    Raises EnvironmentMisconfigured where neither is to be found.
    """
    try:
        if context is None and (_IN_CLUSTER / "token").is_file():
            config.load_incluster_config()
            own = (_IN_CLUSTER / "namespace").read_text().strip()
            return Cluster(client.ApiClient(), namespace or own)
        # The client's own default is what the variable was when it was imported.
        files = os.environ.get("KUBECONFIG")
        api = config.new_client_from_config(files, context=context, persist_config=False)
        contexts, active = config.list_kube_config_contexts(files)
        chosen = next((found for found in contexts if found["name"] == context), active)
        return Cluster(api, namespace or chosen["context"].get("namespace", "default"))
    except (ConfigException, OSError, *_NO_KUBECONFIG) as error:
        told = first_line(str(error))
        raise EnvironmentMisconfigured(
            "KUBECONFIG",
            wanted="a kubeconfig, or a pod with a service account",
            found=told if isinstance(error, ConfigException) else f"{type(error).__name__}: {told}",
            remedy="name the file in KUBECONFIG, and a context of it with --context",
        ) from error
