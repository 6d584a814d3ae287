"""The boundary: attributed once, cause kept, nothing swallowed."""

import pytest

from mallm.errors import EngineError, EpisodeError, WorldError, boundary


def test_a_foreign_exception_becomes_the_boundarys_kind_and_keeps_its_cause():
    cause = ConnectionError('gone')
    with (
        pytest.raises(EngineError, match='sampling as a: ConnectionError: gone') as caught,
        boundary(EngineError, 'sampling as a'),
    ):
        raise cause
    assert caught.value.__cause__ is cause


def test_an_episode_error_passes_unchanged_through_any_boundary():
    first = WorldError('observing')
    with pytest.raises(WorldError) as caught, boundary(EngineError, 'outer'), boundary(EpisodeError, 'inner'):
        raise first
    assert caught.value is first


@pytest.mark.parametrize('signal', [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_let_through(signal):
    with pytest.raises(signal), boundary(WorldError, 'acting'):
        raise signal


def test_nothing_happens_where_nothing_fails_and_each_kind_has_its_own_label():
    with boundary(WorldError, 'acting'):
        done = True
    assert done and len({error.kind for error in (EpisodeError, EngineError, WorldError)}) == 3
