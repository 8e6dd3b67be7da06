"""A language model, run as two streams.

Reading order, for Revela:

1. language_model.py: stream e and stream h over packed chunks (../packing.py), and what they share.
2. document_attention.py: b, as the equation reads, and faster (document_attention_varlen.py is for
   a GPU); ``InBatchAttention``, with the gate: h = (1 - g) s + g b. Sim comes from
   training/methods/revela.py: ``in_batch_weights``.
3. cross_entropy.py: the loss of stream h.

prompts.py is what the LM reads in DREAM; generate.py writes queries. encoder_decoder.py is T5, for
span corruption.
"""
