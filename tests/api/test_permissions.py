"""Checkpoint permissions: another project of the organization may call a tuned model, and no more."""

from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from core.database.engine import Work
from core.database.tables import Organization, TunedModel
from core.tenancy import keys, tenants
from tests.api.conftest import House

if TYPE_CHECKING:
    from httpx2 import Response

NAME = "ft:org/large:default:mine:abcd1234:ckpt-step-5"
URL = f"/v1/fine_tuning/checkpoints/{NAME}/permissions"


@pytest.fixture
def tuned(house: House) -> None:
    with house.database.write() as session:
        model = TunedModel(name=NAME, project_id=house.project.id, job_id="ftjob-1", base_model="org/large")
        model.checkpoint_id = "ftckpt_1"
        session.add(model)


@pytest.fixture
def neighbor(house: House) -> tuple[str, TestClient]:
    """Another project of the same organization: its id, and a client with its key."""
    with house.database.write() as session:
        work = Work(session)
        organization = session.get_one(Organization, house.project.organization_id)
        project = tenants.create_project(work, organization, "neighbor")
        return project.id, house.client(keys.create_key(work, project, "n").token)


def grant(api: TestClient, *project_ids: str) -> "Response":
    return api.post(URL, json={"project_ids": list(project_ids)})


def sees(client: TestClient) -> bool:
    return [model["id"] for model in client.get("/v1/models").json()["data"] if model["id"] == NAME] == [NAME]


@pytest.mark.both_databases
def test_a_named_project_may_look_up_and_list_the_model_until_it_is_revoked(
    api: TestClient, tuned: None, neighbor: tuple[str, TestClient]
) -> None:
    project_id, theirs = neighbor
    assert theirs.get(f"/v1/models/{NAME}").status_code == 404

    answer = grant(api, project_id).json()

    [permission] = answer["data"]
    assert permission["object"] == "checkpoint.permission"
    assert (permission["id"][:3], permission["project_id"]) == ("cp_", project_id)
    assert (answer["object"], answer["has_more"], answer["last_id"]) == ("list", False, permission["id"])
    assert theirs.get(f"/v1/models/{NAME}").status_code == 200
    assert sees(theirs)

    deleted = api.delete(f"{URL}/{permission['id']}").json()

    assert deleted == {"id": permission["id"], "object": "checkpoint.permission", "deleted": True}
    assert theirs.get(f"/v1/models/{NAME}").status_code == 404
    assert not sees(theirs)


def test_who_may_call_a_model_may_not_delete_or_share_it(
    api: TestClient, tuned: None, neighbor: tuple[str, TestClient]
) -> None:
    project_id, theirs = neighbor
    grant(api, project_id)

    assert theirs.delete(f"/v1/models/{NAME}").status_code == 404
    assert theirs.get(URL).status_code == 404
    assert grant(theirs, project_id).status_code == 404


@pytest.mark.both_databases
def test_a_permission_is_granted_once(api: TestClient, tuned: None, neighbor: tuple[str, TestClient]) -> None:
    project_id, _ = neighbor

    first, second = (grant(api, project_id, project_id).json()["data"] for _ in range(2))

    assert first == second
    assert len(first) == 1
    assert api.get(URL).json()["data"] == first


def test_a_project_of_another_organization_is_refused_as_one_that_never_was(
    house: House, api: TestClient, tuned: None
) -> None:
    with house.database.read() as session:
        stranger = keys.authenticate(session, house.other_key)[1].id

    for project_id in (stranger, "proj_none"):
        answer = grant(api, project_id)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "project_ids")
        assert answer.json()["error"]["message"] == f"No such project in this organization: {project_id}"
    assert api.get(URL).json()["data"] == []


def test_sharing_takes_an_administrators_key(
    house: House, tuned: None, neighbor: tuple[str, TestClient]
) -> None:
    writer = house.client(house.new_key("write"))

    assert grant(writer, neighbor[0]).status_code == 403
    assert writer.get(URL).status_code == 200


@pytest.mark.both_databases
def test_permissions_go_with_the_model(
    api: TestClient, house: House, tuned: None, neighbor: tuple[str, TestClient]
) -> None:
    grant(api, neighbor[0])
    api.delete(f"/v1/models/{NAME}")
    with (
        house.database.write() as session
    ):  # a name is never given twice; but if it were, nobody would inherit it
        model = TunedModel(name=NAME, project_id=house.project.id, job_id="ftjob-1", base_model="org/large")
        model.checkpoint_id = "ftckpt_2"
        session.add(model)

    assert api.get(URL).json()["data"] == []
    assert neighbor[1].get(f"/v1/models/{NAME}").status_code == 404


@pytest.mark.both_databases
def test_a_list_is_paged_in_both_orders_and_filtered(house: House, api: TestClient, tuned: None) -> None:
    with house.database.write() as session:
        organization = session.get_one(Organization, house.project.organization_id)
        made = [tenants.create_project(Work(session), organization, name).id for name in "abc"]
    grant(api, *made)

    def pages(order: str) -> list[Any]:
        after, found = None, []
        while True:
            query: Any = {"order": order, "limit": 2} | ({"after": after} if after else {})
            page = api.get(URL, params=query).json()
            found += [permission["project_id"] for permission in page["data"]]
            if not page["has_more"]:
                return found
            after = page["last_id"]

    assert pages("ascending") == made
    assert pages("descending") == made[::-1]
    only = api.get(URL, params={"project_id": made[1]}).json()["data"]
    assert [permission["project_id"] for permission in only] == [made[1]]
    newest = api.get(URL).json()["first_id"]
    behind = api.get(URL, params={"project_id": made[1], "after": newest}).json()["data"]
    assert behind == only, "a permission that the filter leaves out is a cursor, too"
