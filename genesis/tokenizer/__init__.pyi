"""What `genesis.tokenizer` offers, by module; a name's module is imported when the name is first used."""

from .engines import EncodedBatch as EncodedBatch
from .engines import Engine as Engine
from .engines import GigatokenEngine as GigatokenEngine
from .engines import TiktokenEngine as TiktokenEngine
from .engines import make_engine as make_engine
from .export import export_tokenizer as export_tokenizer
from .export import hf_tokenizer_config as hf_tokenizer_config
from .export import hf_tokenizer_json as hf_tokenizer_json
from .export import tiktoken_ranks as tiktoken_ranks
from .neuro import NeuroTokenizer as NeuroTokenizer
