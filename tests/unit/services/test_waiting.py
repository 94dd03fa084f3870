"""Which call a worker is sent next, without any process; and random runs of two workers, which die at times."""

from __future__ import annotations

import random

from verl_like.services.waiting import Call, Place, Waiting


def submit(waiting: Waiting, names: str, session: str | None = None) -> list[Call]:
    calls = [Call(name, object()) for name in names]
    assert waiting.put(calls, session) == ""
    return calls


def take(waiting: Waiting, place: Place, room: int = 9, *, idle: bool = True) -> str:
    calls = waiting.take(place, room, idle=idle, together=False, share=1)
    for call in calls:
        waiting.sent(call, place)
    return "".join(call.payload for call in calls)


def test_the_oldest_call_goes_first_and_calls_of_sessions_alone() -> None:
    waiting, one, two = Waiting(100), Place(), Place()
    first, *_ = submit(waiting, "abc", session="s")
    submit(waiting, "xy")
    assert take(waiting, one) == "a"
    assert take(waiting, two) == "xy"
    submit(waiting, "z")
    assert take(waiting, one) == "z"  # b waits for the end of a
    submit(waiting, "w")
    waiting.done(first)
    assert take(waiting, two) == "w"  # b belongs to the other
    submit(waiting, "v")
    assert take(waiting, one) == "b"  # older than v
    assert take(waiting, one) == "v"
    submit(waiting, "p")
    submit(waiting, "q", session="t")
    assert take(waiting, one) == "p"
    assert take(waiting, one) == "q"


def test_what_is_to_be_sent_alone_waits_for_an_idle_worker() -> None:
    waiting, place = Waiting(100), Place()
    calls = submit(waiting, "abc")
    assert take(waiting, place) == "abc"
    calls[0].alone = True
    waiting.put_back(calls)
    assert take(waiting, place, idle=False) == ""
    assert take(waiting, place) == "a"
    assert take(waiting, place, room=1) == "b"


def test_every_call_ends_once_and_a_session_is_at_one_worker() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        waiting, places = Waiting(10**6), [Place(), Place()]
        submitted: list[Call] = []
        at_work: list[list[Call]] = [[], []]
        ended: list[Call] = []
        while len(ended) < 200:
            step, worker = rng.choice(["put", "take", "answer", "answer", "die", "end"]), rng.randrange(2)
            session = rng.choice([None, "a", "b", "c"])
            if step == "put" and len(submitted) < 200:
                calls = [Call(len(submitted) + number, None) for number in range(min(3, 200 - len(submitted)))]
                submitted += calls
                ended += calls if waiting.put(calls, session) else []
            elif step == "take":
                room = 4 - len(at_work[worker])
                calls = waiting.take(places[worker], room, idle=not at_work[worker], together=False, share=1)
                for call in calls:
                    waiting.sent(call, places[worker])
                at_work[worker] += calls
                mine = [call.session for call in at_work[worker] if call.session is not None]
                assert len(mine) == len(set(mine)) and not set(mine) & {call.session for call in at_work[1 - worker]}
            elif step == "answer" and at_work[worker]:
                call = at_work[worker].pop(rng.randrange(len(at_work[worker])))
                waiting.done(call)
                ended.append(call)
            elif step == "die" and rng.random() < 0.2:
                lost = waiting.lose(places[worker], "gone")
                again = [call for call in at_work[worker] if call.session is None]
                lost += [call for call in at_work[worker] if call.session is not None]
                for call in lost:
                    waiting.done(call)
                ended += lost
                waiting.put_back(again)
                places[worker], at_work[worker] = Place(), []
            elif step == "end" and session is not None:
                waiting.end_session(session)
        assert sorted(call.payload for call in ended) == list(range(200))
        assert waiting.num_calls == 0 and waiting.drain([], places) == []
        for name in "abc":
            waiting.end_session(name)
        assert not any(place.sessions for place in places)
