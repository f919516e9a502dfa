from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.cache.blocks import BlockManager, BlockTable
from moe_lora.cache.pages import PageAllocator


def manager(num_pages: int = 16, *, prefix_caching: bool = True) -> BlockManager:
    return BlockManager(PageAllocator(num_pages), 4, num_pages, prefix_caching=prefix_caching)


def run_sequence(blocks: BlockManager, namespace: int, tokens: list[int]) -> BlockTable:
    table = blocks.match(namespace, tokens)
    assert blocks.grow(table, len(tokens))
    blocks.publish(table, tokens, len(tokens))
    return table


def test_finished_prefix_is_found_again_by_whole_blocks():
    blocks = manager()
    table = run_sequence(blocks, 0, list(range(10)))
    pages = table.pages
    blocks.release(table)
    again = blocks.match(0, list(range(10)))
    assert again.pages == pages[:2]


def test_last_token_is_always_left_to_compute():
    blocks = manager()
    blocks.release(run_sequence(blocks, 0, list(range(8))))
    assert len(blocks.match(0, list(range(8))).blocks) == 1


def test_other_namespace_finds_nothing():
    blocks = manager()
    blocks.release(run_sequence(blocks, 1, list(range(12))))
    assert not blocks.match(2, list(range(12))).blocks


def test_running_sequences_share_the_page_of_an_equal_prefix():
    blocks = manager()
    first = run_sequence(blocks, 0, list(range(9)))
    second = run_sequence(blocks, 0, list(range(9)))
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert blocks.num_used == 4


def test_equal_blocks_computed_side_by_side_become_one():
    blocks = manager()
    tokens = list(range(9))
    tables = [blocks.match(0, tokens), blocks.match(0, tokens)]
    for table in tables:
        assert blocks.grow(table, 9)
    for table in tables:
        blocks.publish(table, tokens, 9)
    assert tables[0].pages[:2] == tables[1].pages[:2]
    assert blocks.num_used == 4


def test_cached_blocks_give_way_oldest_first():
    blocks = manager(4)
    blocks.release(run_sequence(blocks, 0, list(range(8))))
    blocks.release(run_sequence(blocks, 0, list(range(100, 108))))
    table = blocks.match(0, [7])
    assert blocks.grow(table, 8)
    assert not blocks.match(0, list(range(9))).blocks
    assert len(blocks.match(0, list(range(100, 109))).blocks) == 2


def test_grow_takes_nothing_when_it_cannot_take_all():
    blocks = manager(2)
    table = BlockTable(0)
    assert not blocks.grow(table, 12)
    assert blocks.num_used == 0
    assert blocks.grow(table, 8)


def test_forgotten_namespace_frees_its_pages():
    blocks = manager(4)
    blocks.release(run_sequence(blocks, 5, list(range(8))))
    blocks.forget(5)
    assert blocks.num_cached == 0
    assert not blocks.match(5, list(range(9))).blocks


def test_without_prefix_caching_nothing_is_kept():
    blocks = manager(prefix_caching=False)
    blocks.release(run_sequence(blocks, 0, list(range(8))))
    assert blocks.num_cached == 0


sequences = st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=14))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(sequences, st.integers(0, 9)), max_size=40))
def test_every_cached_page_holds_the_tokens_it_is_found_by(operations):
    """A tuple starts a sequence, a number ends one; `content` is what a device would hold per page."""
    blocks = manager(12)
    content: dict[int, tuple[int, tuple[int, ...]]] = {}
    running: list[BlockTable] = []
    for operation in operations:
        if isinstance(operation, int):
            if running:
                blocks.release(running.pop(operation % len(running)))
            continue
        namespace, tokens = operation
        table = blocks.match(namespace, tokens)
        for index, page in enumerate(table.pages):
            assert content[page] == (namespace, tuple(tokens[: (index + 1) * 4]))
        cached = len(table.blocks)
        if not blocks.grow(table, len(tokens)):
            blocks.release(table)
            continue
        for index in range(cached, len(table.blocks)):
            content[table.pages[index]] = (namespace, tuple(tokens[: (index + 1) * 4]))
        blocks.publish(table, tokens, len(tokens))
        running.append(table)
    in_use = {page for table in running for page in table.pages}
    assert blocks.num_used == len(in_use)
    for table in running:
        blocks.release(table)
    assert blocks.num_used == 0
