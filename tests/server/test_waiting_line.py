"""What those who wait are told agrees: who is sooner in the line starts no later."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from server.served import Serve, until
from turnstile.core.forecast import Estimate
from turnstile.server.watch.waiting_line import in_order


@given(st.lists(st.none() | st.floats(0, 1e6)))
def test_starts_are_in_the_order_of_the_line_and_none_is_invented(
    own: list[float | None],
) -> None:
    told = in_order(own)
    known = [start for start in told if start is not None]
    assert all(first <= second for first, second in pairwise(known))
    assert known == sorted(start for start in own if start is not None)
    assert [start is None for start in told] == [start is None for start in own]


def test_a_turn_that_has_passed_to_another_takes_the_sooner_start_along(serve: Serve) -> None:
    """The gate predicts on arrival; then tenants are served, and the line is another."""

    async def test() -> None:
        async with serve(max_num_seqs=1, delay=0.05) as served:
            body = {"max_tokens": 64, "ignore_eos": True}
            tasks = [asyncio.create_task(served.complete(**body)) for _ in range(5)]
            await until(lambda: served.engine.snapshot.waiting == 4)
            # As if each who came later had been predicted to start sooner.
            for wait, trail in zip(
                (90.0, 80.0, 70.0, 60.0, 50.0), served.service.requests.alive(), strict=True
            ):
                trail.estimate = Estimate(wait, wait, wait, wait, wait, wait)
            answer = await served.client.get("/v1/requests?state=waiting")
            line = [told["waits"] for told in answer.json()["data"]]
            assert [waits["position"] for waits in line] == [1, 2, 3, 4]
            starts = [waits["predicted_start_seconds"] for waits in line]
            assert starts == sorted(starts)
            assert len(set(starts)) == 4
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(test())
