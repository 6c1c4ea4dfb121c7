"""One S3 server for all tests here, a new bucket for each."""

import secrets

import pytest
from s3fs import S3FileSystem

from tests.s3.fault_proxy import fault_proxy
from tests.s3.server import create_bucket, s3_environment, s3_server


@pytest.fixture(scope="session")
def s3_endpoint():
    """Address of the S3 server."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_endpoint, monkeypatch):
    """`s3://NAME`, empty; the environment points at its server."""
    for name, value in s3_environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()  # of the test before, whose environment was another
    name = f"test-{secrets.token_hex(4)}"
    create_bucket(s3_endpoint, name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def _proxy(s3_endpoint):
    with fault_proxy(s3_endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy, bucket, monkeypatch):
    """A well-behaved proxy before the server; the environment points at it."""
    _proxy.reset()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", _proxy.endpoint)
    return _proxy
