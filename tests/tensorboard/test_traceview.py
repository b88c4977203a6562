"""The "Parameter servers" tab: TensorBoard as a process, a real browser, mouse and keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import captures as recorded
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from tensorboard_page import Page, missing, tensorboard

from tfps.trace.capture import FIRST_LOOKUP, Capture, CapturedBucket, CapturedPart, CapturedView, Span
from tfps.trace.capture_file import chrome_path, write_chrome
from tfps.trace.summary import Summary, summarize
from tfps.types import Json

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(300)]

JUST_ONE_SLICE = "trace.kindOf(span) === 'wire' && trace.step[span] === 11 && trace.rank[span] === 0"


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Capture]:
    """The same job with two policies, written below `captures["log_dir"]`."""
    log_dir = tmp_path_factory.getbasetemp() / "traceview"
    made = {policy: recorded.capture(policy) for policy in ("fifo", "priority")}
    made["changed"] = changed(made["priority"])
    made["rows"] = with_rows(made["priority"])
    made["parts"] = with_parts(made["priority"])
    for name in made:
        write_chrome(made[name], chrome_path(log_dir / "jobs", name))
    return made


def with_rows(capture: Capture) -> Capture:
    """The same; in each step workers ask both pservers for rows of a table, and add gradients."""
    bucket, spans = len(capture.buckets), list[Span]()
    for step in [span for span in capture.spans if span.kind == "step"]:
        rank, number = step.rank, step.step
        common = {"step": number, "bucket": bucket, "priority": 0, "rank": rank}
        at, end = step.begin_ns, step.end_ns
        spans.append(Span("lookup", rank, "gates", at, at + 900_000, nbytes=2000, **common))
        spans.append(Span("ready", rank, "gradients", end, end, nbytes=2000, **common))
        for pserver in range(2):
            asks = {**common, "slice": FIRST_LOOKUP + 2 * number + pserver, "pserver": pserver, "nbytes": 500}
            adds = {**common, "slice": 0, "pserver": pserver, "nbytes": 1000}
            there, back, to = 2 + pserver, f"to worker {rank}", f"to pserver {pserver}"
            for begin, fields in ((at, asks), (end, adds)):
                spans.append(Span("queued", rank, "queue", begin, begin + 100_000, **fields))
                spans.append(Span("wire", rank, to, begin + 100_000, begin + 300_000, **fields))
            spans.append(Span("held", there, "rows", at + 300_000, at + 500_000, **asks))
            for begin, fields in ((at + 500_000, asks), (end + 500_000, adds)):
                spans.append(Span("reply_queued", there, "reply queue", begin, begin + 100_000, **fields))
                spans.append(Span("reply_wire", there, back, begin + 100_000, begin + 300_000, **fields))
            if rank:
                adds = {**adds, "slice": -1}
                spans.append(Span("aggregate", there, "aggregate", end + 300_000, end + 500_000, **adds))
    buckets = (*capture.buckets, CapturedBucket("user/rows", (), 0, 0))
    return replace(capture, name="rows", buckets=buckets, spans=(*capture.spans, *spans))


def with_parts(capture: Capture) -> Capture:
    """The same; XLA compiles the steps in two parts."""
    parts = CapturedPart("part 1: conv1 … conv2", ("conv1", "conv2", "conv3"), (), 0.5)
    backward = CapturedPart("part 2: conv1, backward", ("conv2",), ("conv1",), 1.5)
    spans = [
        Span("part", span.process, "parts", begin, begin + 2_000_000, slice=number, rank=span.rank)
        for span in capture.spans
        if span.kind == "step"
        for number, begin in enumerate((span.begin_ns, span.begin_ns + 3_000_000))
    ]
    return replace(capture, name="parts", spans=(*capture.spans, *spans), parts=(parts, backward))


def changed(capture: Capture) -> Capture:
    """The same; in its second step worker 1 is lost."""
    step = [span for span in capture.spans if span.kind == "step" and span.process == 0][1]
    at_ns = (step.begin_ns + step.end_ns) // 2
    change = Span("change", 0, "view", at_ns, at_ns, step=step.step, rank=1)
    note = f"step {step.step} is the first that lacks pushes of rank 1; what it had pushed of it counted for 61 %"
    lost = CapturedView(2, (0,), "rank 1 (host1:4711) died at step 12", note, {"fc": (1, 2)})
    views = CapturedView(1, (0, 1)), lost
    return replace(capture, name="changed", spans=(*capture.spans, change), views=views)


@pytest.fixture(scope="module")
def browser(captures: dict[str, Capture], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with tensorboard(tmp_path_factory.getbasetemp() / "traceview") as address:
        page = Page()
        try:
            page.open(address)
            yield page
        finally:
            page.close()


@pytest.fixture
def page(browser: Page) -> Page:
    """One run, nothing selected or searched, everything seen; the last test must have left no errors."""
    browser("tfps.find.value = ''; tfps.search(''); tfps.theme.value = 'auto'; tfps.show('jobs/priority', '')")
    browser.settle()
    return browser


@pytest.fixture(autouse=True)
def no_errors_in_the_console(browser: Page) -> Iterator[None]:
    yield
    assert browser.errors() == []


def test_it_loads_and_draws_every_process(page: Page, captures: dict[str, Capture]) -> None:
    assert page("return tfps.state") == "ready"
    assert page("return trace.count") == len(captures["priority"].spans)
    names = page("return [...pane.root.querySelectorAll('.group')].map((one) => one.firstChild.textContent)")
    assert names == ["▾ worker 0", "▾ worker 1", "▾ pserver 0", "▾ pserver 1"]
    lanes = page("return [...pane.root.querySelectorAll('.lane')].map((one) => one.textContent)")
    assert {"steps", "compute", "gates", "queue", "to pserver 0", "to pserver 1", "aggregate", "to worker 1"} <= set(
        lanes
    )
    assert colours(page) > 5

    def frame_ms() -> float:
        page("view.draw()")
        page.frame()
        return float(page("return view.frameMs"))

    assert min(frame_ms() for _ in range(5)) < 500  # the others may have been interrupted


def colours(page: Page) -> int:
    """How many different colours the canvas shows."""
    return int(
        page(
            "const {data} = view.context.getImageData(0, 0, view.canvas.width, view.canvas.height);"
            "return new Set(new Uint32Array(data.buffer)).size"
        )
    )


def test_a_summary_that_cannot_be_had_is_said_in_its_place_beside_the_timeline(page: Page) -> None:
    page(
        "window.fetched = window.fetch; window.fetch = (url, ...more) => String(url).includes('summary')"
        " ? Promise.reject(new TypeError('connection refused')) : window.fetched(url, ...more);"
        "tfps.show('jobs/fifo', '')"
    )
    page.settle()
    try:
        assert page("return tfps.state") == "failed"
        assert "connection refused" in page("return tfps.message.textContent")
        assert not page("return tfps.message.hidden")
        assert page("return pane.head.textContent").startswith("There is no summary: the request for it failed.")
        assert page("return trace.count") > 0
    finally:
        page("window.fetch = window.fetched")


def test_spans_are_drawn_where_their_times_are(page: Page, captures: dict[str, Capture]) -> None:
    capture = captures["priority"]
    steps = [span for span in capture.spans if span.kind == "step" and span.process == 0]
    shown = page(
        "return [...trace.lanes[0].spans].map((span) => {const r = view.rectOf(span);"
        " return [trace.step[span], r.x, r.width, view.spanAt(r.x + r.width / 2, r.y + r.height / 2) === span]})"
    )
    width = page("return view.width")
    first, seen = steps[0].begin_ns, page("return view.right - view.left")
    left = page("return tfps.viewport.left")
    for span, (step, x, wide, hit) in zip(steps, shown, strict=True):
        assert (step, hit) == (span.step, True)
        assert x == pytest.approx((span.begin_ns - first - left) / seen * width, abs=0.01)
        assert wide == pytest.approx(span.duration_ns / seen * width, abs=0.01)


def test_the_summary_has_the_figures_of_python(page: Page, captures: dict[str, Capture]) -> None:
    summary = summarize(captures["priority"])
    assert page("return pane.summary") == json_of(summary)
    cards = page("return Object.fromEntries([...pane.root.querySelectorAll('.card')].map((c) => "
                 "[c.dataset.name, c.querySelector('strong').textContent]))")  # fmt: skip
    steps = len(summary.steps)
    assert cards["step"] == milliseconds(summary.totals.duration_ns / steps)
    assert cards["computing"] == milliseconds(summary.totals.compute_ns / steps)
    assert cards["exposed wait"] == milliseconds(summary.totals.exposed_ns / steps)
    assert cards["overlap"] == f"{100 * summary.totals.overlap:.1f} %"
    assert cards["slowest"] == f"worker {summary.totals.slowest}"
    assert cards["out of order"] == str(summary.totals.inversions)
    assert summary.limit in page("return pane.root.querySelector('.limit').textContent")
    shown = page(
        "return [...pane.root.querySelectorAll('table')[0].tBodies[0].rows].map((r) => r.cells[0].textContent)"
    )
    assert shown == [cost.variable for cost in summary.costs[:10]]


def milliseconds(ns: float) -> str:
    digits = max(0, 4 - len(str(int(ns / 1e6)))) if ns >= 1e6 else 0
    assert 1e6 <= ns < 1e9, "other units are not tested here"
    return f"{ns / 1e6:.{digits}f} ms"


def json_of(summary: Summary) -> Json:
    return json.loads(json.dumps(asdict(summary)))


def test_mouse_and_keys_zoom_and_pan(page: Page) -> None:
    def seen() -> tuple[float, float]:
        left, right = page("return [tfps.viewport.left, tfps.viewport.right]")
        return left, right

    canvas = page("return view.canvas")
    left, right = seen()
    canvas.send_keys("+")
    after = seen()
    assert after[1] - after[0] == pytest.approx(0.6 * (right - left))
    assert sum(after) == pytest.approx(left + right)
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert seen()[0] == pytest.approx(after[0] + 0.15 * (after[1] - after[0]))
    canvas.send_keys("0")
    assert seen() == (left, right)
    # The wheel with Ctrl zooms around the pointer.
    page(
        "view.canvas.dispatchEvent(new WheelEvent('wheel', {deltaY: -120, ctrlKey: true, cancelable: true,"
        " clientX: view.canvas.getBoundingClientRect().left + view.width / 4}))"
    )
    zoomed = seen()
    assert zoomed[1] - zoomed[0] < 0.7 * (right - left)
    assert zoomed[0] + (zoomed[1] - zoomed[0]) / 4 == pytest.approx(left + (right - left) / 4)
    ActionChains(page.driver).move_to_element(canvas).click_and_hold().move_by_offset(-100, 0).release().perform()
    width = page("return view.width")
    assert seen()[0] == pytest.approx(zoomed[0] + 100 / width * (zoomed[1] - zoomed[0]), rel=0.02)
    page("[...document.querySelectorAll('header button')].find((one) => one.textContent === 'fit').click()")
    assert seen() == (left, right)


def test_a_click_follows_a_slice_through_all_processes(page: Page, captures: dict[str, Capture]) -> None:
    capture = captures["priority"]
    span = page(
        "for (let span = 0; span < trace.count; span++) if (" + JUST_ONE_SLICE + ") {"
        " view.zoomTo(span); view.reveal(span); return span}"
    )
    page.frame()
    x, y = page("const r = view.rectOf(arguments[0]); return [r.x + r.width / 2, r.y + r.height / 2]", span)
    canvas = page("return view.canvas")
    half = canvas.size["width"] / 2, canvas.size["height"] / 2
    ActionChains(page.driver).move_to_element_with_offset(canvas, x - half[0], y - half[1]).click().perform()
    page.frame()
    assert page("return view.selected") == span
    chosen = capture.spans[span]
    expected = sorted(
        position
        for position, one in enumerate(capture.spans)
        if (one.step, one.bucket) == (chosen.step, chosen.bucket)
        and one.slice in (chosen.slice, -1)
        and one.kind not in ("forward", "backward")
    )
    assert sorted(page("return [...view.followed]")) == expected
    rows = page("return [...pane.root.querySelectorAll('.details tbody tr')].map((r) => Number(r.dataset.span))")
    assert sorted(rows) == expected
    assert {capture.spans[row].process for row in rows} == {0, 1, 2 + chosen.pserver}
    assert [capture.spans[row].begin_ns for row in rows] == sorted(capture.spans[row].begin_ns for row in rows)
    assert f"slice {chosen.key} in step {chosen.step}" in page("return pane.root.querySelector('h2').textContent")
    canvas.send_keys(Keys.ESCAPE)
    assert page("return [view.selected, pane.root.querySelectorAll('.details').length]") == [-1, 0]


def test_only_the_lanes_of_the_selected_slice_can_be_shown(page: Page) -> None:
    page("view.select([...Array(trace.count).keys()].find((span) => " + JUST_ONE_SLICE + "), true)")
    every = page("return view.places.size")
    page("pane.root.querySelector('.details button[aria-pressed]').click()")
    lanes = set(page("return [...view.places.keys()].map((lane) => lane.name)"))
    assert page("return view.places.size") < every
    assert set(page("return [...view.followed].map((span) => trace.lane[span].name)")) <= lanes
    assert page("return pane.root.querySelector('.details button[aria-pressed]').ariaPressed") == "true"
    page("return view.canvas").send_keys(Keys.ESCAPE)
    assert page("return view.places.size") == every


def test_spans_are_reached_by_keyboard_alone(page: Page) -> None:
    canvas = page("return view.canvas")
    page("view.canvas.focus()")
    canvas.send_keys("n")
    first = page("return view.selected")
    canvas.send_keys("n")
    second = page("return view.selected")
    assert first >= 0
    assert page("return trace.lane[arguments[0]] === trace.lane[arguments[1]]", first, second)
    canvas.send_keys("p")
    assert page("return view.selected") == first
    canvas.send_keys("j")
    assert page("return trace.lane[view.selected].name") != page("return trace.lane[arguments[0]].name", first)
    assert page("return tfps.live.textContent") == page("return view.describe(view.selected)")
    canvas.send_keys("/")
    assert page("return document.activeElement === tfps.find")
    assert page(
        "return [...document.querySelectorAll('button, select, input, canvas')].every((one) => one.tabIndex >= 0)"
    )


def test_a_search_marks_the_variable_and_enter_goes_to_its_spans(page: Page, captures: dict[str, Capture]) -> None:
    capture = captures["priority"]
    name = capture.buckets[3].variables[0]
    find = page("return tfps.find")
    find.send_keys(name.upper())
    buckets = [number for number, bucket in enumerate(capture.buckets) if any(name in one for one in bucket.variables)]
    page.frame()
    assert page("return [...view.marked]") == buckets
    marked = page("return [...new Set([...view.highlighted].map((span) => trace.bucket[span]))]")
    assert sorted(marked) == buckets
    assert page("return tfps.found.textContent").startswith("1 variable")
    find.send_keys(Keys.ENTER)
    assert page("return trace.bucket[view.selected]") in buckets
    find.send_keys(Keys.ESCAPE)
    assert page("return [view.highlighted && view.selected < 0, tfps.found.textContent]")[1] == ""


def test_a_change_of_the_view_is_a_line_through_the_timeline(page: Page, captures: dict[str, Capture]) -> None:
    assert page("return [trace.changes, pane.root.querySelectorAll('.view').length]") == [[], 0]
    page("tfps.show('jobs/changed', '')")
    page.settle()
    said = page("return [...pane.root.querySelectorAll('.view')].map((one) => one.textContent)")
    summary = summarize(captures["changed"])
    assert said == [f"At the start {summary.view}", *(f"At {change}" for change in summary.changes)]
    ((span, view),) = captures["changed"].changes
    (position,) = page("return trace.changes")
    assert position == captures["changed"].spans.index(span)
    x = page("return view.xOf(trace.begin[trace.changes[0]])")
    low = page("return view.height - 3")  # below all lanes of a high page, or between two
    pixel = "return [...view.context.getImageData(arguments[0], arguments[1], 1, 1).data].slice(0, 3)"
    assert page(pixel, round(x), low) == [0x7B, 0x32, 0x94]
    page("view.scroller.scrollTop = 0")
    page.frame()
    # Its own lane is the first of worker 0.
    y = page("const r = view.rectOf(trace.changes[0]); return r.y + r.height / 2")
    canvas = page("return view.canvas")
    half = canvas.size["width"] / 2, canvas.size["height"] / 2
    move = ActionChains(page.driver).move_to_element_with_offset(canvas, x - half[0], y - half[1])
    move.perform()
    tip = page("return view.tip.textContent")
    assert tip == f"generation 2: {view.reason} · worker 0 takes part · {view.note}"
    move.click().perform()
    page.frame()
    assert page("return view.selected") == position
    assert page("return pane.root.querySelector('.details h2').textContent") == f"generation 2: {view.reason}"
    below = page("return [...pane.root.querySelectorAll('.details p')].map((one) => one.textContent)")
    assert below == ["From here on worker 0 takes part.", f"{view.note}. Slices without it: fc [1, 2]."]
    page("view.select(-1); pane.root.querySelector('.view .change').click()")
    assert page("return view.selected") == position


def test_rows_of_a_table_are_followed_from_their_ids_to_the_step_and_their_gradients_apart(
    page: Page, captures: dict[str, Capture]
) -> None:
    def legend() -> set[str]:
        return set(page("return [...tfps.legend.children].map((one) => one.textContent)"))

    words = {"waiting for rows", "rows held back"}
    assert not words & legend()
    page("tfps.show('jobs/rows', '')")
    page.settle()
    assert words <= legend()
    capture, summary = captures["rows"], summarize(captures["rows"])
    names = page("return trace.lanes.filter((lane) => lane.process === 2).map((lane) => lane.name)")
    assert names[:2] == ["rows", "aggregate"]

    def followed(kind: str, rank: int, pserver: int, asks: bool) -> set[int]:
        """What a span of the second step leads to; the one after it is of the next step."""
        step = summary.steps[1].step
        (chosen,) = [
            position
            for position, one in enumerate(capture.spans)
            if (one.kind, one.step, one.rank, one.pserver) == (kind, step, rank, pserver)
            and one.bucket in capture.tables
            and capture.is_lookup(one) == asks
        ]
        page("view.select(arguments[0], true)", chosen)
        expected = {
            position
            for position, one in enumerate(capture.spans)
            if (one.step, one.bucket, capture.is_lookup(one)) == (step, len(capture.buckets) - 1, asks)
            and (not asks or one.rank == rank)
            and (one.pserver == pserver or -1 in (one.pserver, pserver))
        }
        assert set(page("return [...view.followed]")) == expected
        page("[...pane.root.querySelectorAll('.details button')].find((one) => one.textContent === 'step ›').click()")
        assert page("return [trace.step[view.selected], trace.kindOf(view.selected)]") == [step + 1, kind]
        return expected

    assert len(followed("lookup", 0, -1, asks=True)) == 11  # itself, and five of each pserver
    assert len(followed("wire", 1, 0, asks=True)) == 6
    assert len(followed("wire", 1, 1, asks=False)) == 11  # a pair of all but the sum
    said = {span.kind: page("return view.describe(arguments[0])", at) for at, span in enumerate(capture.spans)
            if span.bucket in capture.tables and capture.is_lookup(span)}  # fmt: skip
    assert said["wire"].startswith("on the wire ids of user/rows · ")
    assert said["reply_wire"].startswith("reply on the wire rows of user/rows · ")
    assert said["held"].startswith("rows held back user/rows · 200 µs · ")
    assert said["lookup"].startswith("waiting for rows user/rows · 900 µs · 2.00 kB · ")
    cells = page("return [...[...pane.root.querySelectorAll('table')].find((one) => one.caption.textContent.startsWith("
                 "'tables')).tBodies[0].rows[0].cells].map((one) => one.textContent)")  # fmt: skip
    assert cells[:5] == ["user/rows", "900 µs", "200 µs", "1.00 kB", "1.00 kB"]


def test_parts_that_xla_compiles_have_a_lane_and_say_for_which_gates_they_wait(page: Page) -> None:
    assert "part that XLA compiled" not in page("return tfps.legend.textContent")
    page("tfps.show('jobs/parts', '')")
    page.settle()
    assert "part that XLA compiled" in page("return tfps.legend.textContent")
    names = page("return trace.lanes.filter((lane) => lane.process === 0).map((lane) => lane.name)")
    assert names[:4] == ["steps", "compute", "parts", "gates"]
    at = page("return [...trace.kind.keys()].filter((span) => trace.kindOf(span) === 'part').slice(0, 4)")
    first, second = (next(span for span in at if page("return trace.slice[arguments[0]]", span) == n) for n in (0, 1))
    assert page("return view.describe(arguments[0])", first).startswith("part that XLA compiled part 1: conv1 … conv2 ")
    page("view.select(arguments[0], true)", second)
    assert page("return pane.root.querySelector('.details h2').textContent") == "part 2: conv1, backward"
    assert page("return [...pane.root.querySelectorAll('.details p')].map((one) => one.textContent)") == [
        "It waits at the gates of conv2.",
        "It computes the gradients of conv1.",
        "Compiled in 1.500 s on worker 0.",
    ]
    cells = page("return [...[...pane.root.querySelectorAll('table')].find((one) => one.caption.textContent.startsWith("
                 "'parts')).tBodies[0].rows].map((row) => [...row.cells].map((one) => one.textContent))")  # fmt: skip
    assert cells == [
        ["part 1: conv1 … conv2", "conv1, conv2 and 1 more", "2.000 ms", "500.0 ms"],
        ["part 2: conv1, backward", "conv2", "2.000 ms", "1.500 s"],
    ]


def test_two_runs_are_compared_side_by_side_on_one_scale(page: Page, captures: dict[str, Capture]) -> None:
    page("tfps.other.value = 'jobs/fifo'; tfps.other.dispatchEvent(new Event('change'))")
    page.settle()
    boxes = page(
        "return tfps.panes.map((one) => {const b = one.root.getBoundingClientRect(); return [b.left, b.right, b.top]})"
    )
    assert boxes[0][1] <= boxes[1][0] + 1
    assert boxes[0][2] == boxes[1][2]
    assert page("return tfps.panes.map((one) => one.summary)") == [
        json_of(summarize(captures[name])) for name in ("priority", "fifo")
    ]
    change = summarize(captures["fifo"]).totals.duration_ns / summarize(captures["priority"]).totals.duration_ns - 1
    assert change > 0.02, "the example shows a difference"
    assert page("return tfps.panes[1].root.querySelector('.card .worse').textContent") == f"▲ {100 * change:.1f} %"
    page("return view.canvas").send_keys("+")
    page.frame()
    assert page("return tfps.panes.map((one) => one.timeline.right - one.timeline.left)[0]") == pytest.approx(
        page("return tfps.panes[1].timeline.right - tfps.panes[1].timeline.left")
    )


def test_dark_and_light_follow_tensorboard_and_the_choice(page: Page) -> None:
    def background() -> str:
        page.frame()
        return str(page("return getComputedStyle(document.body).backgroundColor"))

    light = background()
    page("parent.document.body.classList.toggle('dark-mode', true)")
    dark = background()
    page("parent.document.body.classList.toggle('dark-mode', false)")
    assert background() == light != dark
    page("tfps.theme.value = 'dark'; tfps.restyle()")
    assert background() == dark


def test_nothing_comes_from_elsewhere(page: Page) -> None:
    assert page("return performance.getEntriesByType('resource').every((one) => one.name.startsWith(location.origin))")
    page("tfps.color.value = 'layer'; tfps.restyle()")
    page.frame()
    assert colours(page) > 5
    page("tfps.color.value = 'kind'; tfps.restyle()")


def test_a_new_capture_can_be_chosen_and_one_that_cannot_be_read_is_said(
    page: Page, tmp_path_factory: pytest.TempPathFactory
) -> None:
    broken = chrome_path(tmp_path_factory.getbasetemp() / "traceview", "broken")
    broken.parent.mkdir(parents=True, exist_ok=True)
    broken.write_bytes(b"no capture")
    try:
        # The server's list of runs is two seconds old at most.
        page.driver.execute_async_script(
            "const done = arguments[0]; (async () => { while (!(await tfps.list()).includes('broken'))"
            " await new Promise((next) => setTimeout(next, 100)); done() })()"
        )
        assert page("return [...tfps.run.options].map((one) => one.value).includes('broken')")
        page("tfps.show('broken', '')")
        page.settle()
        assert "cannot read the capture" in page("return tfps.message.textContent")
        assert page.errors()[0].count("400") == 1
    finally:
        broken.unlink()
