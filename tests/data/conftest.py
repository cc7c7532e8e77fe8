from hypothesis import settings

# Machines that run other things at the same time miss any deadline now and then.
settings.register_profile("no deadline", deadline=None, max_examples=50)
settings.load_profile("no deadline")
