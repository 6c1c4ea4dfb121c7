"""The manifests in launch/: against the published schemas, for OpenShift's rules, and with settings that exist."""

import copy
import gzip
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml
from torch.distributed.run import parse_args

from config import load_config
from data.ledger import build_phases

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    "TrainJob": "trainer.kubeflow.org_trainjobs",
    "PyTorchJob": "kubeflow.org_pytorchjobs",
    "AppWrapper": "workload.codeflare.dev_appwrappers",
}


def strict(schema):
    """A schema that refuses unknown fields, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def validate(manifest):
    """Raises jsonschema.ValidationError."""
    text = gzip.decompress((ROOT / f"tests/schemas/{SCHEMAS[manifest['kind']]}.yaml.gz").read_bytes())
    (definition,) = filter(None, yaml.load_all(text, yaml.CSafeLoader))
    group, _, version = manifest["apiVersion"].partition("/")
    assert group == definition["spec"]["group"]
    schemas = {of_version["name"]: of_version["schema"] for of_version in definition["spec"]["versions"]}
    jsonschema.validate(manifest["spec"], strict(schemas[version]["openAPIV3Schema"]["properties"]["spec"]))


def load(name):
    return yaml.safe_load((ROOT / "launch" / name).read_text())


WRAPPER = load("kubernetes/pytorchjob-appwrapper.yaml")
OBJECTS = {
    "TrainJob": load("kubernetes/trainjob.yaml"),
    "AppWrapper": WRAPPER,
    "PyTorchJob": WRAPPER["spec"]["components"][0]["template"],
    "Pod": load("kubernetes/pod.yaml"),
}


def pod_and_arguments(kind):
    spec = OBJECTS[kind]["spec"]
    if kind == "TrainJob":
        (node,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return node["template"]["spec"]["template"]["spec"], spec["trainer"]["args"]
    pod = spec
    if kind == "PyTorchJob":
        pod = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    return pod, pod["containers"][0]["args"]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_manifests_fit_the_published_schemas(kind):
    manifest = OBJECTS[kind]
    validate(manifest)
    misspelt = copy.deepcopy(manifest)
    misspelt["spec"]["nummNodes"] = 2
    with pytest.raises(jsonschema.ValidationError, match="nummNodes"):
        validate(misspelt)


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob", "Pod"])
def test_pods_need_no_rights(kind):
    """What OpenShift's restricted-v2 and Kubernetes' restricted profile ask for."""
    pod, _ = pod_and_arguments(kind)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "runAsUser" not in pod["securityContext"], "OpenShift chooses the user id"
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/scratch", "/dev/shm", "/runs"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob", "Pod"])
def test_arguments_are_settings_and_credentials_are_in_the_secret(kind):
    _, arguments = pod_and_arguments(kind)
    assert arguments[0].startswith("/runs/"), "launch/node.sh takes the run's folder first"
    config = load_config(arguments[arguments.index("train.py") + 1 :])
    elastic = OBJECTS[kind]["spec"].get("elasticPolicy")
    if elastic:  # the batch stays the same with any number of nodes
        ranks = [8 * nodes for nodes in range(elastic["minReplicas"], elastic["maxReplicas"] + 1)]
        assert [build_phases(config.training, n) for n in ranks]
        assert config.training.global_batch_size
    text = yaml.safe_dump(OBJECTS[kind]["spec"])
    assert "titanite-s3" in text
    assert not re.search(r"AKIA|SECRET_ACCESS_KEY.*value: ", text)


def test_commands_of_the_page_have_options_that_exist():
    text = (ROOT / "docs" / "clusters.md").read_text().replace("\\\n", "")
    (line,) = re.findall(r"^launch/node\.sh .*", text, re.MULTILINE)
    arguments = parse_args(shlex.split(line)[2:])
    assert (arguments.nnodes, arguments.training_script) == ("2", "train.py")
    load_config(arguments.training_script_args)
    jobs = re.findall(r"launch/slurm\.sh (--[^`)\n]*)", text)
    assert jobs
    for settings in jobs:
        load_config(shlex.split(settings))
