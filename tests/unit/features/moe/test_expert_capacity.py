"""A step runs again if a rank needed more rows than there is room for, whatever the room is."""

import pytest
import torch

from titan_lite.features.moe.capacity import ExpertCapacity


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("needed", "exceeded"), [(0.0, False), (0.9, False), (1.0, False), (1.2, True), (2.0, True)]
)
def test_a_step_is_repeated_where_more_rows_are_needed_than_there_is_room_for(needed, exceeded):
    capacity = ExpertCapacity([], 1.5, torch.device("cpu"), recomputes=False)
    capacity.needed.fill_(needed)  # relative to the room
    assert (capacity.repeat() is not None) == exceeded
    assert capacity.repeated_steps == exceeded
    assert capacity.most == pytest.approx(1.5 * needed)  # relative to equally loaded experts
