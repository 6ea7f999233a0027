"""/v1/structures: jobs, their content and limits, and bodies that are refused."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import numpy as np
import pytest
from support import structures
from support.live import live_server, wait_for

from fastkernels import LLM, FoldParams
from fastkernels.engine.http.requests.config import ServerConfig

PATH = "/v1/structures"
CHAINS = [{"sequence": "MKV", "count": 2}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return structures.checkpoint(tmp_path_factory.mktemp("openfold3"))


@pytest.fixture(scope="module")
def url(folder):
    options = {"max_model_len": 40, "num_blocks": None, "max_images": 4}
    with live_server(folder, ServerConfig("fold", max_jobs=3), **options) as found:
        yield found[0]


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(url + PATH, json=body, timeout=60)


def get(url: str, path: str = "") -> httpx.Response:
    return httpx.get(f"{url}{PATH}{path}", timeout=60)


def finished(url: str, own: str) -> dict[str, Any]:
    wait_for(lambda: get(url, f"/{own}").json()["status"] in ("completed", "failed"), 60)
    return get(url, f"/{own}").json()


def test_structure_is_made_watched_fetched_and_deleted(url, folder):
    made = post(url, chains=CHAINS, num_samples=2, num_steps=3, num_recycles=0, seed=4).json()
    assert (
        made["status"] in ("queued", "in_progress") and made["num_residues"] == 6 and made["samples"] is None
    )
    own = made["id"]
    job = finished(url, own)
    assert job["status"] == "completed" and job["progress"] == 100 and len(job["samples"]) == 2
    assert all(0 < one["plddt"] < 100 and 0 <= one["iptm"] <= 1 for one in job["samples"])
    with LLM(str(folder), device="cpu") as llm:
        want = llm.fold({"chains": CHAINS}, FoldParams(2, 0, 3, 4), use_tqdm=False)[0]
    for sample in range(2):
        text = get(url, f"/{own}/content?sample={sample}")
        assert text.headers["content-type"].startswith("chemical/x-mmcif") and text.text == want.text(sample)
    no_room = get(url, f"/{own}/content?format=pdb")  # random weights send atoms far away
    assert no_room.status_code == 400 and "use 'cif'" in no_room.json()["error"]["message"]
    found = get(url, f"/{own}/content?format=json&sample=1").json()
    np.testing.assert_allclose(found["positions"], want.structures.positions[1], atol=1e-3)
    assert np.shape(found["pae"]) == (6, 6)
    assert [one["id"] for one in get(url).json()["data"]] == [own]
    for query in ("format=xyz", "sample=2", "sample=-1", "sample=one"):
        assert get(url, f"/{own}/content?{query}").status_code == 400
    assert httpx.delete(f"{url}{PATH}/{own}", timeout=60).json()["deleted"] is True
    assert get(url, f"/{own}").status_code == 404


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"chains": None}, "chains", "needs either `chains` or `features`"),
        ({"chains": []}, "chains", "with at least one"),
        ({"chains": [{"sequence": "MJ"}]}, "chains", "the letter 'J' at position 2"),
        ({"chains": [{"sequence": "M\u017f"}]}, "chains", "at position 2"),  # its capital letter is S
        (
            {"chains": [{"sequence": "M", "msa": ">a"}]},
            "chains",
            "'msa'; known: id, kind, sequence, count; alignments,",
        ),
        (
            {"chains": [{"sequence": "M", "kind": "ligand"}]},
            "chains",
            "'ligand', which is none of protein, rna, dna; ",
        ),
        ({"chains": [{"sequence": "M" * 20_000}]}, "chains", "has 20000 residues, and a request may have 40"),
        ({"features": {}}, "features", "needs either"),
        ({"chains": None, "features": {"msa": 1}}, "features", "has no residue_index"),
        ({"num_samples": 5}, "num_samples", "num_samples must be at most 4"),
        ({"num_recycles": 51}, "num_recycles", "num_recycles must be at most 50"),
        ({"num_steps": 0}, "num_steps", "got 0"),
        ({"ligands": []}, "ligands", "unknown field"),
    ],
)
def test_wrong_bodies_are_refused(url, changes, param, words):
    answer = post(url, **{"chains": CHAINS, **changes})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"]


def test_nan_fails_the_job_by_its_reason(url):
    given = {name: value.tolist() for name, value in structures.batch().items()}
    given["token_bonds"][0][0][0] = 1e30
    made = post(url, features=given, num_samples=1, num_steps=1, num_recycles=0).json()
    job = finished(url, made["id"])
    assert job["status"] == "failed" and "numbers of the input are too large" in job["error"]["message"]
    assert httpx.delete(f"{url}{PATH}/{made['id']}", timeout=60).status_code == 200


def test_client_that_leaves_while_it_sends_is_no_error(url, caplog):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
    assert get(url).status_code == 200
    wait_for(lambda: httpx.get(f"{url}/load", timeout=60).json()["server_load"] == 0, 60)
    assert not [r for r in caplog.records if r.exc_info]


def test_jobs_are_limited_and_a_running_one_ends_when_deleted(url):
    made = [post(url, chains=[{"sequence": "MKVAGW" * 5}], num_steps=100).json()["id"] for _ in range(3)]
    refused = post(url, chains=CHAINS)
    assert refused.status_code == 429 and "3 structures" in refused.json()["error"]["message"]
    for own in made:
        assert httpx.delete(f"{url}{PATH}/{own}", timeout=60).status_code == 200
    assert get(url).json()["data"] == []
    again = post(url, chains=[{"sequence": "M"}], num_steps=1, num_samples=1, num_recycles=0).json()
    assert finished(url, again["id"])["status"] == "completed"
