"""The name maps reach every variable once, and a variable bears its 2021 name."""

import pytest

from bigbird.classifier.run_classifier import ClassifierLossLayer
from bigbird.core.checkpoint_formats.name_maps import HEADS, NAMINGS, named_variables
from bigbird.core.layers import FirstTokenTransform
from bigbird.core.modeling import BertModel, TransformerModel
from bigbird.pretrain.heads import MaskedLMLayer, NSPLayer


@pytest.fixture(params=["bert", "transformer", "own positions", "coupled"])
def model(request, tiny_params, norm_type, use_bias):
    """A model of every family and form."""
    params = {**tiny_params, "norm_type": norm_type, "use_bias": use_bias}
    if request.param == "bert":
        return BertModel(params)
    return TransformerModel(
        {
            **params,
            "scope": "pegasus",
            "couple_encoder_decoder": request.param == "coupled",
            "own_decoder_positions": request.param == "own positions",
            "num_decoder_layers": None if request.param == "coupled" else 3,
        }
    )


@pytest.mark.parametrize("norm_type", ["prenorm", "postnorm"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_the_maps_name_every_variable_and_a_variable_bears_its_2021_name(model):
    names_2021, names_hf = (named_variables(model, naming) for naming in NAMINGS)
    for named in (names_2021, names_hf):
        assert {id(row.variable) for row in named.values()} == {id(v) for v in model.variables}
    assert len(names_2021) == len(model.variables)
    # A coupled model has one 2021 name for what encoder and decoder share, and no other.
    assert model.config.couple_encoder_decoder or len(names_hf) == len(model.variables)
    for name, row in names_2021.items():
        assert row.variable.name == f"{name}:0"


@pytest.mark.parametrize("naming", NAMINGS)
def test_the_map_names_every_variable_of_the_heads(tiny_params, naming):
    model = BertModel(tiny_params)
    heads = {
        "classifier": ClassifierLossLayer(16, 3, name="bert/classifier"),
        "classifier_transform": FirstTokenTransform(16, name="bert/classifier/transform"),
        "masked_lm": MaskedLMLayer(16, 50, model.embeddings),
        "next_sentence": NSPLayer(16),
    }
    assert heads.keys() == HEADS.keys()
    named = named_variables(model, naming, heads)
    of_heads = {id(v) for head in heads.values() for v in head.variables}
    assert {id(row.variable) for row in named.values()} == {
        *map(id, model.variables),
        *of_heads,
    }
    if naming == "tf1":
        assert all(row.variable.name == f"{name}:0" for name, row in named.items())
