"""The picture of a model."""

from __future__ import annotations

from xml.etree import ElementTree

from controller.models.drawing import draw_model


def test_every_block_is_drawn_and_names_are_escaped() -> None:
    block = {"fixed_ms": 1.0, "per_item_ms": 2.0, "param_bytes": 1 << 20, "cut_bytes_per_item": 2048}
    model = {
        "name": "vit", "split_axis": "patch",
        "blocks": [{**block, "name": "encoder.layer.0"}, {**block, "name": "<head> & tail", "fixed_ms": 9.0}],
    }  # fmt: skip
    picture = ElementTree.fromstring(draw_model(model))
    texts = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert any("encoder.layer.0" in text for text in texts)
    assert any("<head> & tail" in text for text in texts)
    bars = [
        float(element.attrib["width"])
        for element in picture.iter("{http://www.w3.org/2000/svg}rect")
        if element.attrib["fill"] == "#2f6f9f"
    ]
    assert bars[1] == max(bars) > bars[0]
