"""`data=generate`: the model continues prompts; decoding, sampling, and groups of completions in the store. Imports
`job` and below."""
