"""Gradient compression with error feedback: codecs by name, residuals, and the compressed sum over a process group."""

from unisono.kvstore.codecs.auto import Choice as Choice
from unisono.kvstore.codecs.auto import auto_codec as auto_codec
from unisono.kvstore.codecs.codec import Codec as Codec
from unisono.kvstore.codecs.codec import codes_values as codes_values
from unisono.kvstore.codecs.exchange import Exchange as Exchange
from unisono.kvstore.codecs.exchange import exchange as exchange
from unisono.kvstore.codecs.feedback import Feedback as Feedback
from unisono.kvstore.codecs.find import COARSE_WITH_ADAM as COARSE_WITH_ADAM
from unisono.kvstore.codecs.find import find_codec as find_codec
from unisono.kvstore.codecs.find import nothing_travels as nothing_travels
from unisono.kvstore.codecs.find import too_late as too_late
from unisono.kvstore.codecs.powersgd import PowerSgd as PowerSgd
