"""Compares pictures in SVG by what they say and show."""

import re
from xml.etree import ElementTree

import numpy as np


def assert_same(committed, drawn, again: str):
    (texts, shapes), (now_texts, now_shapes) = content(committed), content(drawn)
    assert texts == now_texts and len(texts) > 10, again
    assert len(shapes) == len(now_shapes) > 20, again
    for (style, numbers), (now_style, now_numbers) in zip(shapes, now_shapes, strict=True):
        assert style == now_style and len(numbers) == len(now_numbers), again
        np.testing.assert_allclose(numbers, now_numbers, atol=0.5, err_msg=again)


def content(path):
    """The texts of a picture, and its shapes with their numbers: without letters' outlines and the
    legend's places, which differ with matplotlib's version."""
    texts, shapes = [], []

    def walk(element, in_legend):
        for child in element:
            if child.tag is ElementTree.Comment:
                texts.append(child.text.strip())
            elif child.tag.endswith(("}defs", "}metadata")) or (
                child.get("id", "").startswith("text_") and not list(child)
            ):
                continue
            elif child.get("id", "").startswith("text_"):
                texts.extend(c.text.strip() for c in child.iter(ElementTree.Comment))
            elif child.tag.endswith(("}path", "}use")) and not in_legend:
                place = " ".join(child.get(name, "") for name in ("d", "x", "y"))
                shapes.append(
                    (child.get("style"), [float(n) for n in re.findall(r"-?\d+\.?\d*", place)])
                )
            else:
                walk(child, in_legend or child.get("id", "").startswith("legend"))

    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    walk(ElementTree.parse(path, parser).getroot(), in_legend=False)
    return texts, shapes
