"""What ``offload="state"`` refuses, and what becomes of a model whose late step fails."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

from streamshard import StreamShard
from streamshard.errors import ConfigError
from tests.ranks import RankContext, on_ranks
from tests.reference import built
from tests.simulated import simulated_device
from tests.training.test_offload_events import OFFLOAD

# -- settings ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_settings_that_do_not_go_with_offload_are_refused(context: RankContext) -> None:
    """Each error says what to do."""
    with pytest.raises(ConfigError, match="whose memory is the host's: leave it away"):
        StreamShard(built(), **OFFLOAD)
    with simulated_device():
        for slots in ({"weight_slots": "all"}, {"grad_slots": "all"}):
            with pytest.raises(ConfigError, match="streams layers from host memory through a few slots"):
                StreamShard(built(), **OFFLOAD, **slots)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        with pytest.raises(ConfigError, match="on a 2-D mesh.*leave mesh away"):
            StreamShard(built(), mesh=mesh, **OFFLOAD)
