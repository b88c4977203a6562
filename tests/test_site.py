"""The documentation site: it builds without a warning, and its pages do in a browser what they say."""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
from api_page import public
from bounds import Cluster, lower_bound
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait
from tensorboard_page import Page, missing

from tfps.strategy.patches import TABLE
from tfps.types import Json
from tools import model_profiles
from tools.messages import HOLE, messages

NEEDED = ("mkdocs", "material")


def absent() -> str:
    """Why the site cannot be built, or nothing."""
    for name in NEEDED:
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(name) is not None:
                continue
        return f"needs {name}: pip install '.[docs]'"
    return ""


pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(absent()), reason=absent())]
in_a_browser = [pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from the working tree; fails at the first warning."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=jobs.ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert built.returncode == 0, built.stdout
    return folder


def test_it_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").is_file()


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r'<(?:script|img|iframe|link rel="(?:stylesheet|preconnect)")[^>]*?(?:src|href)="?(https?://[^"> ]+)'
    )
    assert not [(page.name, found) for page in site.rglob("*.html") for found in loaded.findall(page.read_text())]


def text_of(site: Path, page: str) -> str:
    return html.unescape((site / page / "index.html").read_text(encoding="utf-8"))


def test_what_is_made_from_the_code_is_there(site: Path) -> None:
    troubleshooting = text_of(site, "troubleshooting")
    assert "messages:" not in troubleshooting
    assert not [each.text for each in messages() if " ".join(each.text.split()) not in troubleshooting]
    patches = text_of(site, "keras_patches")
    assert not [patch.place for patch in TABLE if f"<code>{patch.place}</code>" not in patches]
    api = text_of(site, "api")
    for name, members in public().items():
        assert not [member for member in members if f'id="{name}.{member}"' not in api], name
    assert "snapshot_steps" in api, "arguments are described"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a web server on a free port."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, name="site")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def browser(site: Path) -> Iterator[tuple[Page, str]]:
    with served(site) as address:
        page = Page()
        try:
            yield page, address
        finally:
            page.close()


@pytest.fixture
def form(browser: tuple[Page, str]) -> Page:
    """The calculator, fresh."""
    page, address = browser
    page.driver.get(f"{address}/size/")
    return page


def fill(page: Page, **values: str | float) -> None:
    for name, value in values.items():
        field = page.driver.find_element(By.NAME, name)
        if field.tag_name == "select":
            Select(field).select_by_value(str(value))
        elif field.get_attribute("type") == "file":
            field.send_keys(str(value))
        else:
            field.clear()
            field.send_keys(str(value))


def answer(page: Page, name: str) -> str:
    return page.driver.find_element(By.CSS_SELECTOR, f"output[name={name}]").get_attribute("data-value") or ""


PASTE = """
    const data = new DataTransfer();
    data.setData("text", arguments[1]);
    arguments[0].dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
"""
FIND = """
    const box = document.querySelector("#tfps-find textarea");
    return arguments[0].map((error) => {
      box.value = error;
      box.dispatchEvent(new Event("input", { bubbles: true }));
      return [...document.querySelectorAll("#tfps-find li code")].map((code) => code.textContent.trim());
    });
"""
FILL = """
    for (const [name, value] of Object.entries(arguments[0])) document.getElementsByName(name)[0].value = value;
    document.querySelector("#tfps-size form").dispatchEvent(new Event("input"));
"""
CLUSTERS: list[dict[str, Json]] = [
    {"workers": 1, "pservers": 1, "rate": 1.0},
    {"workers": 2, "pservers": 2, "rate": 1.0},
    {"workers": 4, "pservers": 4, "rate": 5.0},
    {"workers": 4, "pservers": 2, "rate": 2.5},
    {"workers": 16, "pservers": 3, "rate": 25.0},
    {"workers": 8, "pservers": 12, "rate": 10.0},
    {"workers": 8, "pservers": 4, "rate": 10.0, "place": "dedicated"},
    {"workers": 64, "pservers": 8, "rate": 100.0, "cores": 2.0, "cpu": 2.4},
    {"workers": 4, "pservers": 4, "rate": 10.0, "latency": 20.0, "goodput": 0.5},
]


def cluster_of(values: dict[str, Json]) -> Cluster:
    """What the form's fields mean to the simulator; what is left out has the form's own values."""
    return Cluster(
        workers=values["workers"],
        pservers=values["pservers"],
        rate_gbit=values["rate"],
        goodput=values.get("goodput", 0.95),
        latency_s=values.get("latency", 0.05) / 1e3,
        dedicated="place" in values,
        cpu_gb_s=values.get("cpu", 1.7),
        process_cores=values.get("cores", 1.0),
    )


class TestInABrowser:
    pytestmark = in_a_browser

    @pytest.mark.parametrize("model", model_profiles.names())
    def test_the_calculator_computes_what_the_simulator_does(self, form: Page, model: str) -> None:
        profile = model_profiles.load(model)
        fill(form, model=model)
        for values in CLUSTERS:
            form(FILL, {"place": "beside", "goodput": 0.95, "latency": 0.05, "cpu": 1.7, "cores": 1, **values})
            assert float(answer(form, "step")) == pytest.approx(lower_bound(profile, cluster_of(values)), rel=1e-12)
            assert float(answer(form, "compute")) == pytest.approx(profile.compute_s, rel=1e-12)
        assert form.errors() == []

    def test_its_advice_holds_in_the_simulator(self, form: Page) -> None:
        profile = model_profiles.load("vgg19")
        fill(form, model="vgg19", workers=8, pservers=8, rate=25)
        enough = int(answer(form, "enough"))

        def step_s(pservers: int, rate: float = 25.0) -> float:
            return lower_bound(profile, cluster_of({"workers": 8, "pservers": pservers, "rate": rate}))

        assert 1 < enough < 8
        assert step_s(enough) <= 1.02 * step_s(8) < step_s(enough - 1)
        needed = float(answer(form, "needed"))
        assert profile.compute_s / step_s(8, needed) == pytest.approx(0.9, rel=1e-6)

    def test_a_profile_of_the_reader_can_be_chosen(self, form: Page, tmp_path: Path) -> None:
        profile = model_profiles.load("sockeye").scaled(10)
        model_profiles.save(profile, tmp_path / "model.json")
        fill(form, model="own", file=str(tmp_path / "model.json"))
        expected = lower_bound(profile, cluster_of({"workers": 4, "pservers": 4, "rate": 10.0}))
        WebDriverWait(form.driver, 60, 0.05).until(lambda _: answer(form, "step"))
        assert float(answer(form, "step")) == pytest.approx(expected, rel=1e-12)

    def test_another_file_is_refused_with_what_is_wanted(self, form: Page, tmp_path: Path) -> None:
        (tmp_path / "other.json").write_text(json.dumps({"layers": []}))
        fill(form, model="own", file=str(tmp_path / "other.json"))
        assert "save_profile" in form.driver.find_element(By.CLASS_NAME, "tfps-error").text
        assert answer(form, "step") == ""

    def test_a_number_out_of_range_is_named(self, form: Page) -> None:
        fill(form, workers=0)
        assert form.driver.find_element(By.CLASS_NAME, "tfps-error").text.startswith("Workers: ")

    @pytest.mark.parametrize(
        "error",
        [
            "slice_bytes must be positive, got 0",
            "pserver 10.0.0.4:7070: no answer within 60 s (UNAVAILABLE: failed to connect to all addresses)",
            "rank 1 (two:4711) died at step 17: its connection ended without a leave",
            "the workers do not train the same, line 3 of what they declare differs: rank 0 has dense",
        ],
    )
    def test_an_error_pasted_into_the_search_box_finds_troubleshooting(
        self, browser: tuple[Page, str], error: str
    ) -> None:
        page, address = browser
        page.driver.get(f"{address}/")
        box = page.driver.find_element(By.CSS_SELECTOR, "input.md-search__input")
        box.click()
        page(PASTE, box, error)
        first = "return document.querySelector('a.md-search-result__link')?.href ?? ''"  # changes while it searches
        WebDriverWait(page.driver, 60).until(lambda _: page(first).startswith(f"{address}/troubleshooting/"))

    def test_the_box_for_errors_finds_every_message(self, browser: tuple[Page, str]) -> None:
        page, address = browser
        page.driver.get(f"{address}/troubleshooting/")
        known = messages()
        errors = [f"tfps.errors.{message.kind}: {message.text.replace(HOLE, '1')}" for message in known]
        found = page(FIND, errors)
        assert not [(each, codes) for each, codes in zip(known, found, strict=True) if each.text not in codes]
        assert page(FIND, ["something else"]) == [[]]
