"""What a model's output says: thoughts, text and calls of functions, in the forms that models are trained for."""
