"""What one rank tells of itself: the same as its whole analysis would, of which only a part is made."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from handmade import op, steps, write

from gpudiag import analysis
from gpudiag.inputs import open_rank
from gpudiag.job.rank_summary import encode_summary, summarise_rank
from gpudiag.recordings.paths import RankInput

EVENTS = [*steps(0, 50, 100), op("aten::mm", 10, 40, [[64, 32], [32, 16]]), op("aten::mm", 60, 90, [[64, 32], [32, 16]])]


def of_whole_analysis(item: RankInput) -> bytes:
    whole = analysis.analyse(open_rank(item), lambda _: None)
    return encode_summary(summarise_rank(whole, rank=item.rank, path=item.path))


def test_a_part_of_the_analysis_tells_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "rank3.json", *EVENTS)
    item = RankInput(3, str(tmp_path / "rank3.json"))
    whole = of_whole_analysis(item)
    for name in ("build_all_graphs", "find_memory"):  # what nobody reads of a rank among others
        monkeypatch.delattr(analysis, name)
    assert analysis.answer_summary_request(msgspec.json.encode(item)) == whole


def test_so_it_does_for_a_gpu(traces: Path) -> None:
    path = traces / "v100_dlrm_train_8ranks" / "rank5.json.gz"
    if not path.is_file():
        pytest.skip(f"no trace {path}")
    item = RankInput(5, str(path))
    assert analysis.answer_summary_request(msgspec.json.encode(item)) == of_whole_analysis(item)
