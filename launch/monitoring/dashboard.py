"""Writes the Grafana dashboard: ``python -m launch.monitoring.dashboard`` after a change of ``PANELS``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "grafana" / "sglang-kvq.json"
#: A panel's size on Grafana's grid: columns, of 24, and rows.
WIDTH, HEIGHT = 8, 7
#: Grafana replaces this variable by a suitable time range.
INTERVAL = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """A panel of curves.

    Attributes:
        queries: PromQL query and legend of each curve.
        unit: Grafana's name of the unit.
        sessions: True if the metrics exist only with ``--episodic-policy``.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    sessions: bool = False

    @property
    def about(self) -> str:
        """Text of the panel's tooltip."""
        return "With --episodic-policy only." if self.sessions else ""


def rate(metric: str) -> str:
    """Returns the query of a counter's increase per second."""
    return f"rate({metric}[{INTERVAL}])"


def of_sglang(metric: str) -> str:
    """Returns a selector of SGLang's metric; some releases of Prometheus store its colon as an underscore."""
    return f'{{__name__=~"sglang[:_]{metric}"}}'


_TTFT = f"sum by (le) (rate({of_sglang('time_to_first_token_seconds_bucket')}[{INTERVAL}]))"

PANELS = (
    Panel("Served", (("sglang_kvq_info", "{{method}}, {{bits}} bits, {{version}}, rotations {{rotations_sha256}}"),)),
    Panel(
        "Capacity",
        (
            ('sglang_kvq_pool_tokens{tier="quantized"}', "tokens that fit"),
            ("sglang_kvq_bf16_equivalent_tokens", "BF16 would hold"),
        ),
    ),
    Panel("Errors of the cache", (("sglang_kvq_errors_total", "errors"),)),
    Panel("Tokens held", (("sglang_kvq_held_tokens", "{{tier}}"),)),
    Panel("Bytes held", (("sglang_kvq_held_bytes", "{{tier}}"),), "bytes"),
    Panel(
        "Part of each tier that is held",
        (("sglang_kvq_held_tokens / sglang_kvq_pool_tokens", "{{tier}}"),),
        "percentunit",
    ),
    Panel(
        "Requests",
        (
            (of_sglang("num_running_reqs"), "running"),
            (of_sglang("num_queue_reqs"), "queued"),
            ("sglang_kvq_held_back_requests", "held back: no room for another window"),
        ),
    ),
    Panel("Window pages read in few bits", (("sglang_kvq_lost_window_pages", "pages"),)),
    Panel("Pages quantized per second", ((rate("sglang_kvq_quantized_pages_total"), "pages"),)),
    Panel("Prefix tokens read per second", ((rate("sglang_kvq_prefix_tokens_total"), "{{tier}}"),)),
    Panel("Generated tokens per second", ((of_sglang("gen_throughput"), "tokens"),)),
    Panel(
        "Time to first token",
        tuple((f"histogram_quantile({q}, {_TTFT})", f"{q:.0%}") for q in (0.5, 0.95)),
        "s",
    ),
    Panel("Sessions", (("sglang_kvq_sessions", "remembered"),), sessions=True),
    Panel("Memory of sessions", (("sglang_kvq_session_state_bytes", "bytes"),), "bytes", sessions=True),
    Panel(
        "Requests of sessions per second",
        (
            (rate("sglang_kvq_session_requests_total"), "read {{read}}"),
            (rate("sglang_kvq_session_rebuilds_total"), "histories computed again"),
            (rate("sglang_kvq_episode_blocks_total"), "blocks folded into episodes"),
        ),
        sessions=True,
    ),
    Panel(
        "Prompt tokens of sessions computed per second",
        ((rate("sglang_kvq_session_computed_tokens_total"), "tokens"),),
        sessions=True,
    ),
)


def build() -> str:
    """Returns the dashboard's JSON."""
    from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
    from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos

    source = DataSourceRef(type_val="prometheus", uid="${source}")
    board = (
        dashboard.Dashboard("sglang-kvq")
        .uid("sglang-kvq")
        .tags(["sglang"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    )
    legend_below = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
    )
    for number, panel in enumerate(PANELS):
        row, column = divmod(number, 24 // WIDTH)
        drawn = (
            timeseries.Panel()
            .title(panel.title)
            .description(panel.about)
            .unit(panel.unit)
            .min(0)
            .legend(legend_below)
            .datasource(source)
            .grid_pos(GridPos(h=HEIGHT, w=WIDTH, x=column * WIDTH, y=row * HEIGHT))
        )
        for letter, (query, legend) in zip("ABC", panel.queries):
            drawn = drawn.with_target(prometheus.Dataquery().expr(query).legend_format(legend).ref_id(letter))
        board = board.with_panel(drawn)
    return f"{JSONEncoder(sort_keys=True, indent=2).encode(board.build())}\n"


if __name__ == "__main__":
    FILE.write_text(build())
