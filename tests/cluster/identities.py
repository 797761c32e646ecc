"""Who is who in the cluster: one authority, the API server's certificate, and a token for each."""

from __future__ import annotations

import base64
import secrets
import subprocess
from pathlib import Path
from string import Template

from tests.cluster import network
from tests.cluster.places import TEMPLATES

# User, and the groups it is in.
USERS = {
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    "system:kube-proxy": "",
    "dns": "",
}

SERVER_EXTENSIONS = """\
subjectAltName = {names}
extendedKeyUsage = serverAuth
keyUsage = critical, digitalSignature
"""


class Identities:
    """Keys, certificates, tokens and kubeconfigs, as files in one folder."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self.authority = folder / "authority.crt"
        self.certificate, self.key = folder / "apiserver.crt", folder / "apiserver.key"
        self.signer = folder / "service-accounts.key"
        self.tokens = folder / "tokens.csv"

    def kubeconfig(self, user: str) -> Path:
        """The file by which a user reaches the API server."""
        return self.folder / f"{user.replace(':', '-')}.kubeconfig"

    def make(self, nodes: list[str]) -> None:
        """Make all of them anew, for these nodes too."""
        self.folder.mkdir(parents=True, mode=0o700)
        self._certificates()
        users = {**USERS, **{f"system:node:{node}": "system:nodes" for node in nodes}}
        template = Template((TEMPLATES / "kubeconfig.yaml").read_text())
        authority = base64.b64encode(self.authority.read_bytes()).decode()
        lines = []
        for user, groups in users.items():
            token = secrets.token_hex(16)
            lines.append(f'{token},{user},{user},"{groups}"')
            text = template.substitute(
                address=self.address, authority=authority, user=user, token=token
            )
            self.kubeconfig(user).write_text(text)
        self.tokens.write_text("\n".join(lines) + "\n")

    def _certificates(self) -> None:
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        request, extensions = self.folder / "apiserver.csr", self.folder / "apiserver.ext"
        authority_key = self.folder / "authority.key"
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        names.append("kubernetes.default.svc.cluster.local")
        alternatives = [f"DNS:{name}" for name in names]
        alternatives += [f"IP:{ip}" for ip in (self.address, network.FIRST_SERVICE, "127.0.0.1")]
        extensions.write_text(SERVER_EXTENSIONS.format(names=",".join(alternatives)))
        files: list[str | Path] = ["-keyout", authority_key, "-out", self.authority]
        usage = ["-addext", "keyUsage = critical, keyCertSign, cRLSign"]
        _openssl("req", "-x509", *key, "-days", "30", "-subj", "/CN=eagle3-testbed", *usage, *files)
        _openssl("req", *key, "-subj", "/CN=apiserver", "-keyout", self.key, "-out", request)
        signed_by: list[str | Path] = [
            "-CA",
            self.authority,
            "-CAkey",
            authority_key,
            "-CAcreateserial",
        ]
        files = ["-in", request, "-extfile", extensions, "-out", self.certificate]
        _openssl("x509", "-req", "-days", "30", *signed_by, *files)
        _openssl("genrsa", "-out", self.signer, "2048")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
