"""What the prefix cache holds, as a tree: a path from the root is a prefix, and every node a run of blocks.

    root "qwen3-8b"
    └─ 192 tokens, blocks 1-12
       ├─ 112 tokens, blocks 14-20
       └─ 16 tokens, block 31, free

Source: book 8.3.3, the prefix tree of twelve rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mini_engine.block import Block
from mini_engine.block_manager import BlockManager
from mini_engine.cache_key import CacheKey


@dataclass(frozen=True)
class PrefixNode:
    """Blocks that follow each other with no branch between them.

    key: of a first node, what its prefix was computed under; None further down.
    num_free: how many of the blocks nobody references, so that they may be given out.
    """

    key: CacheKey | None
    block_ids: tuple[int, ...]
    num_tokens: int
    num_free: int
    children: tuple[PrefixNode, ...]

    def walk(self, before: int = 0) -> Iterator[tuple[int, PrefixNode]]:
        """This node and all below, each with the tokens before it."""
        yield before, self
        for child in self.children:
            yield from child.walk(before + self.num_tokens)


def prefix_tree(blocks: BlockManager) -> tuple[PrefixNode, ...]:
    """The cached prefixes of a pool; each tree in the order in which its blocks became known.

    A block whose parent has been given out already cannot be found any more, though the pool still lists it: left out.
    """
    followers: dict[int | CacheKey | None, list[Block]] = {}
    for block in blocks.pool.cached.values():
        followers.setdefault(block.parent_hash, []).append(block)
    keys = [key for key in followers if isinstance(key, CacheKey)]
    return tuple(_node(block, key, followers, blocks.block_size) for key in keys for block in followers[key])


def render(nodes: Iterable[PrefixNode], indent: str = "") -> str:
    """The tree in lines of text."""
    lines = []
    nodes = list(nodes)
    for i, node in enumerate(nodes):
        last = i == len(nodes) - 1
        lines.append(f"{indent}{'└─' if last else '├─'} {_label(node)}")
        if node.children:
            lines.append(render(node.children, indent + ("   " if last else "│  ")))
    return "\n".join(lines)


def _node(
    block: Block, key: CacheKey | None, followers: dict[int | CacheKey | None, list[Block]], size: int
) -> PrefixNode:
    run = [block]
    while len(following := followers.get(run[-1].block_hash, [])) == 1:
        run.append(following[0])
    children = tuple(_node(child, None, followers, size) for child in following)
    num_free = sum(each.ref_count == 0 for each in run)
    return PrefixNode(key, tuple(each.block_id for each in run), size * len(run), num_free, children)


def _label(node: PrefixNode) -> str:
    names = " ".join(f"{first}-{last}" if first != last else f"{first}" for first, last in _ranges(node.block_ids))
    parts = [f"{node.num_tokens} tokens", f"block{'s' if len(node.block_ids) > 1 else ''} {names}"]
    if node.num_free:
        parts.append("free" if node.num_free == len(node.block_ids) else f"{node.num_free} free")
    if node.key is not None and (name := ", ".join(filter(None, (node.key.model, node.key.adapter, node.key.salt)))):
        parts.append(f"under {name}")
    return ", ".join(parts)


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """1 2 3 7 8  →  (1, 3) (7, 8)"""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
