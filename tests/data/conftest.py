from hypothesis import settings

# No deadline: a busy machine would sometimes miss it.
settings.register_profile("no deadline", deadline=None, max_examples=30)
settings.load_profile("no deadline")
