"""Architectures that count absolute positions along the row, from their own offset.

Their position embeddings run document by document, and attention uses transformers' attention interface. Without the
patch they attend across documents without an error: they build masks without `position_ids` (transformers 5.23).
"""

from trl_packfa.patches.base import InterfacePatch

PATCH = InterfacePatch(
    model_types=(
        "bart", "bert", "bert-generation", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert",
        "data2vec-text", "electra", "ernie", "marian", "mbart", "pegasus", "plbart", "roberta", "roberta-prelayernorm",
        "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod",
    ),
    beside=(
        "BartLearnedPositionalEmbedding", "BertEmbeddings", "BertGenerationEmbeddings",
        "BigBirdPegasusLearnedPositionalEmbedding", "BlenderbotLearnedPositionalEmbedding",
        "BlenderbotSmallLearnedPositionalEmbedding", "CamembertEmbeddings", "Data2VecTextEmbeddings",
        "ElectraEmbeddings", "ErnieEmbeddings", "MBartLearnedPositionalEmbedding",
        "MarianSinusoidalPositionalEmbedding", "PLBartLearnedPositionalEmbedding",
        "PegasusSinusoidalPositionalEmbedding", "RobertaEmbeddings", "RobertaPreLayerNormEmbeddings",
        "RoCBertEmbeddings", "XLMRobertaEmbeddings", "XLMRobertaXLEmbeddings", "XmodEmbeddings",
    ),
)  # fmt: skip
